"""Dicts of nothing but plain CPU tensors, taken as one value.

A state of a hundred thousand small tensors is mostly such dicts. Their names, dtypes and shapes are
the same at every save, so what follows from them (JSON text, native rows) is made once and kept; at
each save all of it is compared with what is there now, column by column, and only the addresses are
new. A restore compares the text that the live tensors would have with the stored one.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from json.encoder import encode_basestring
from math import prod
from typing import Any

from drivetrain import _native
from drivetrain._checkpoint import dtypes, typed_json
from drivetrain._checkpoint.typed_json import Key, Path

#: Marks in a skeleton: a dict of tensors, a dict of dicts. No key equals them.
_TENSORS, _DICTS = object(), object()
_KEYS = frozenset((str, int))


@contextmanager
def paused_collector() -> Iterator[None]:
    """No garbage collection inside: planning makes many objects and no cycles, and a full
    collection in a process with torch takes as long as planning a thousand tensors."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(eq=False)
class Block:
    """What the names, dtypes and shapes of a tree of dicts of tensors lead to."""

    path: Path
    pinned: frozenset[Key]
    """Keys of the dict itself whose tensors the first rank must write."""
    skeleton: list[Any]
    shapes: list[Any]
    kinds: list[Any]
    """The tensors' dtypes."""
    ties: dict[int, int]
    """Number of a tensor that is the very memory of an earlier one: that one's number."""
    text: str
    """JSON of the tree."""
    rows: _native.TensorRows
    """One for each tensor that is tied to no earlier one."""

    @cached_property
    def paths(self) -> list[Path]:
        """Of all tensors, in order."""
        return list(_paths(iter(self.skeleton), self.path))

    def holds(self, path: Path, pinned: frozenset[Key], columns: "_Columns") -> bool:
        """Whether all of it is what a tree leads to that looks like this."""
        return (
            self.path == path
            and self.pinned == pinned
            and self.ties == columns.ties
            and self.skeleton == columns.skeleton
            and self.shapes == columns.shapes
            and self.kinds == columns.kinds
        )


@dataclass(eq=False)
class Found:
    """A block, and the tensors that it stands for now."""

    block: Block
    tensors: list[Any]
    addresses: list[int]
    """As the rows want them."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the rows."""
        ties = self.block.ties
        return sum(tensor.nbytes for i, tensor in enumerate(self.tensors) if i not in ties)


@dataclass
class _Columns:
    skeleton: list[Any]
    tensors: list[Any]
    shapes: list[Any]
    kinds: list[Any]
    addresses: list[int]
    ties: dict[int, int]


def find(
    tree: dict[Key, Any],
    path: Path,
    ranks: list[int],
    known: Block | None = None,
    pinned: frozenset[Key] = frozenset(),
) -> Found | None:
    """The tree as a block, `known` if that still holds; None if anything in it is not plain.

    `ranks`: those that hold the same, the first of which writes what is pinned.
    """
    if dtypes.loaded("torch") is None or type(tree) is not dict:
        return None
    columns = _columns(tree, len(path))
    if columns is None:
        return None
    block: Block | None = known
    if block is None or not block.holds(path, pinned, columns):
        block = _made(tree, path, ranks, pinned, columns)
        if block is None:
            return None
    addresses, ties = columns.addresses, columns.ties
    if ties:
        addresses = [at for i, at in enumerate(addresses) if i not in ties]
    return Found(block, columns.tensors, addresses)


def _columns(tree: dict[Key, Any], depth: int) -> _Columns | None:
    classes, base = dtypes.plain_classes(), dtypes.loaded("torch").Tensor
    skeleton: list[Any] = []
    tensors: list[Any] = []
    if not _collect(tree, classes, skeleton, tensors, depth) or not tensors:
        return None
    # one column after the other: no Python code runs per tensor
    try:
        plain = all(map(base.is_cpu.__get__, tensors)) and all(map(base.is_contiguous, tensors))
        if not plain or any(map(base.is_neg, tensors)):
            return None
        shapes = list(map(base.shape.__get__, tensors))
        addresses = list(map(base.data_ptr, tensors))
    except RuntimeError:  # sparse, nested and others without plain memory
        return None
    kinds = list(map(base.dtype.__get__, tensors))
    if any(kind.is_complex for kind in set(kinds)) and any(map(base.is_conj, tensors)):
        return None
    ties = _ties(addresses, shapes, kinds)
    return None if ties is None else _Columns(skeleton, tensors, shapes, kinds, addresses, ties)


def _collect(
    tree: dict[Key, Any], classes: frozenset[type], skeleton: list, tensors: list, depth: int
) -> bool:
    """Lists the tensors; False for anything but dicts of tensors, or of dicts, with plain keys."""
    if depth > typed_json.DEPTH_MAX or not _KEYS.issuperset(map(type, tree)):
        return False
    values = tree.values()
    kinds = set(map(type, values))
    if kinds <= classes:
        skeleton += (_TENSORS, len(tree), *tree)
        tensors += values
        return True
    if kinds != {dict}:
        return False
    skeleton += (_DICTS, len(tree), *tree)
    return all(_collect(value, classes, skeleton, tensors, depth + 1) for value in values)


def _paths(skeleton: Iterator[Any], path: Path) -> Iterator[Path]:
    mark, count = next(skeleton), next(skeleton)
    keys = [next(skeleton) for _ in range(count)]
    for key in keys:
        if mark is _TENSORS:
            yield (*path, key)
        else:
            yield from _paths(skeleton, (*path, key))


def _ties(addresses: list[int], shapes: list[Any], kinds: list[Any]) -> dict[int, int] | None:
    """None where tensors share memory in another way than being the same, or have none."""
    distinct = set(addresses)
    if 0 in distinct:
        return None
    ties: dict[int, int] = {}
    if len(distinct) == len(addresses):
        return ties
    first: dict[int, int] = {}
    for i, at in enumerate(addresses):
        earlier = first.setdefault(at, i)
        if earlier == i:
            continue
        if shapes[i] != shapes[earlier] or kinds[i] is not kinds[earlier]:
            return None
        ties[i] = earlier
    return ties


def _made(
    tree: dict[Key, Any], path: Path, ranks: list[int], pinned: frozenset[Key], columns: _Columns
) -> Block | None:
    """A new block; None for dtypes or keys that have no plain form."""
    numbers: dict[tuple[Any, Any], int] = {}
    # the next number is used by each new kind alone, and looked up by all
    kind_of = [numbers.setdefault(k, len(numbers)) for k in zip(columns.kinds, columns.shapes)]
    kinds, nodes_of = [], []
    for dtype, shape in numbers:
        stored, own = dtypes.torch_name(dtype)
        extents = list(shape)
        if own is not None or 0 in extents:
            return None
        kinds.append((stored, extents, prod(extents) * dtype.itemsize))
        nodes_of.append(typed_json.dumps({"~tensor": {"dtype": stored, "shape": extents}}))
    nodes = [nodes_of[kind] for kind in kind_of]
    ties = columns.ties
    all_paths = list(_paths(iter(columns.skeleton), path)) if ties or pinned else []
    for i, earlier in ties.items():
        nodes[i] = f'{nodes[i][:-2]},"at":{typed_json.path_json(all_paths[earlier])}}}}}'
    paths: list[str] = []
    try:
        text = _text(tree, typed_json.path_json(path)[:-1], iter(nodes), paths, path)
    except _native.Unsupported:
        return None
    rest = [i for i in range(len(paths)) if i not in ties]
    pins = {i for i, (*above, key) in enumerate(all_paths) if key in pinned and (*above,) == path}
    rows = _native.TensorRows(
        [paths[i] for i in rest],
        [kind_of[i] for i in rest],
        kinds,
        ranks,
        [number for number, i in enumerate(rest) if i in pins],
    )
    return Block(path, pinned, columns.skeleton, columns.shapes, columns.kinds, ties, text, rows)


def _text(
    tree: dict[Key, Any], prefix: str, nodes: Iterator[str], paths: list[str], path: Path
) -> str:
    """JSON of a tree of dicts; adds the JSON of its tensors' paths to `paths`."""
    keys, spelled = _spelled(list(tree), path)
    if type(next(iter(tree.values()), None)) is dict:
        children = (
            _text(child, f"{prefix},{one}", nodes, paths, (*path, key))
            for one, (key, child) in zip(spelled, tree.items())
        )
        texts = [f"{key}:{child}" for key, child in zip(keys, children)]
    else:
        paths += [f"{prefix},{key}]" for key in spelled]
        texts = [f"{key}:{node}" for key, node in zip(keys, nodes)]
    return f"{{{','.join(texts)}}}"


def _spelled(keys: list[Any], path: Path) -> tuple[list[str], list[str]]:
    """The keys as JSON keys, and as items of a JSON path."""
    if set(map(type, keys)) == {str}:
        spelled = list(map(encode_basestring, keys))
        if typed_json.is_utf8("".join(keys)) and not any(key[:1] == "~" for key in keys):
            return spelled, spelled
    own = [encode_basestring(typed_json.encode_key(key, path)) for key in keys]
    return own, [str(key) if type(key) is int else encode_basestring(key) for key in keys]
