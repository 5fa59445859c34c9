"""Restore, first half: pairs what is stored with what is live, before anything is touched.

`Plan` decodes the stored tree into fresh containers whose tensors are the live ones wherever one of
the same shape stands at the same place. It collects three lists: memory to fill from the files,
copies to make after that (live tensors on a device, of another dtype or strides), and calls to make
last (`load_state_dict`, assignments into given dicts).
"""

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from drivetrain import _native
from drivetrain._checkpoint import dtypes, optimizer, pieces, stages, typed_json
from drivetrain._checkpoint.alike import Alike, has_hooks, split
from drivetrain._checkpoint.blocks import Found
from drivetrain._checkpoint.fills import (
    Fill,
    copy_containers,
    dict_items,
    empty_dict,
    fills_of,
    new_like,
)
from drivetrain._checkpoint.meta import Materialise, is_meta
from drivetrain._checkpoint.pieces import Place
from drivetrain._checkpoint.renaming import Rename, Renaming, compiled, live_paths
from drivetrain._checkpoint.rng import set_rng_state
from drivetrain._checkpoint.tree import RNG, check_named, is_stateful
from drivetrain._checkpoint.typed_json import Path, format_path
from drivetrain._checkpoint.values import PerRank, RestorePlan, Sharded
from drivetrain._native import Corrupt, InvalidArgument, Unsupported

#: Names spelled out in one error message.
NAMES_SHOWN_MAX = 8


@dataclass
class Plan:
    """What a restore will do on this rank."""

    opened: _native.OpenStep
    rank: int
    world_size: int
    allow_pickle: bool = False
    state: dict[str, Any] = field(default_factory=dict)
    mapped: dict[int, int] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    reshaped: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    strict: bool = True
    stage_ranks: tuple[int, ...] | None = None
    """The ranks that hold the names of this one; None: all ranks hold all names."""
    neighbours: frozenset[int] = frozenset()
    """Other ranks on this machine, which read the same files."""
    _alike: list[Found] = field(default_factory=list)
    _fills: dict[tuple, list[Fill]] = field(default_factory=dict)
    _copies: list[tuple[Any, Any]] = field(default_factory=list)
    _calls: list[Callable[[], None]] = field(default_factory=list)
    _first: list[Callable[[], None]] = field(default_factory=list)
    _whole: dict[Path, Any] = field(default_factory=dict)
    _own: dict[str, Any] | None = None
    _names: optimizer.Names = field(default_factory=dict)
    _live: tuple[int, Any] = (0, None)
    _loose: bool = False
    _holes: list[str] = field(default_factory=list)
    _loaded: list[Path] = field(default_factory=list)
    _parameters: dict[typed_json.Key, Any] = field(default_factory=dict)

    def add_all(self, targets: dict[str, Any], rng: bool, rename: Rename | None = None) -> None:
        """Pairs every target; raises before anything is touched.

        `InvalidArgument` names what does not fit with `strict`: shapes, missing and unexpected
        names.
        """
        check_named(targets)
        text = self.opened.state_json()
        alike: dict[str, Alike] = {}
        if rename is None:
            tree, alike = split(text, targets)
        else:
            tree = typed_json.loads(text)
        if not isinstance(tree, dict):
            raise Corrupt("checkpoint state is no object; restore another step")
        self._names = optimizer.parameter_names(targets)
        if rename is not None:
            self._rename(tree, targets, rename)
        if self.stage_ranks is not None:
            stages.narrow(tree, targets, self._names)
        for name, live in targets.items():
            if name in alike:
                self.state[name] = alike[name].loaded
                self._alike.append(alike[name].found)
                continue
            if name not in tree:
                self.missing.append(str(name))
                continue
            self.state[name], new = self._fill(tree[name], live, (name,))
            if new is not live:
                self._calls.append(partial(targets.__setitem__, name, new))
        # a row that nobody saved says more than the stack that it keeps from being whole
        stacks = {hole.rsplit("[", 1)[0] for hole in self._holes}
        self.missing = [name for name in self.missing if name not in stacks] + self._holes
        if self.strict and (self.missing or self.unexpected or self.reshaped):
            raise InvalidArgument(self._mismatch())
        if rng and RNG in tree:
            generators = self._decode(tree[RNG], (RNG,))
            self._calls.append(lambda: set_rng_state(generators))

    def _rename(self, tree: dict[str, Any], targets: dict[str, Any], rename: Rename) -> None:
        renaming = Renaming(compiled(rename), live_paths(targets))
        renaming.apply(tree, optimizer.stored_keys(targets, (), self._names))
        self.renamed = renaming.renamed
        self._holes = renaming.missing

    def read(self) -> None:
        """Fills memory from the files; checksums and coverage are proven on the way."""
        fills = [fill for group in self._fills.values() for fill in group]
        alone = "partial" if self.neighbours else "alone"
        if self._alike:
            # by themselves: other targets may lie in the same memory
            blocks = [(found.block.rows, found.addresses) for found in self._alike]
            sharing = "all" if self._repeated(set(self.stage_ranks or ())) else "alone"
            self.opened.read_into([], sharing, blocks)
            for found in self._alike:
                _count_writes(found.tensors)
        for sharing, repeated in ((alone, False), ("all", True)):
            rows = [fill.native() for fill in fills if fill.repeated is repeated]
            if rows:
                self.opened.read_into(rows, sharing)
        for fill in fills:
            if fill.live is not None:
                self._copies.append((fill.live, fill.buffer))
            elif dtypes.is_tensor(fill.buffer):
                _count_write(fill.buffer)

    def apply(self) -> None:
        """Makes the copies and the calls."""
        if any(dtypes.is_tensor(live) for live, _ in self._copies):
            import torch

            with torch.no_grad():
                self._copy()
        else:
            self._copy()
        # memory of meta parameters before optimizers cast their state to where those are
        for call in (*self._first, *self._calls):
            call()

    def _copy(self) -> None:
        for live, buffer in self._copies:
            if dtypes.is_tensor(live):
                live.copy_(buffer if dtypes.is_tensor(buffer) else _tensor_of(buffer))
            else:
                source = buffer.numpy() if dtypes.is_tensor(buffer) else buffer
                dtypes.loaded("numpy").copyto(live, source, casting="unsafe")

    def report(self) -> RestorePlan:
        """What would be done."""
        fills = [fill for group in self._fills.values() for fill in group]
        return RestorePlan(
            self.opened.step,
            sorted(map(format_path, self._loaded_paths())),
            sum(pieces.address(fill.buffer)[1] for fill in fills)
            + sum(found.size_bytes for found in self._alike),
            self.missing,
            self.unexpected,
            self.reshaped,
            self.renamed,
        )

    def _loaded_paths(self) -> Iterator[Path]:
        yield from self._loaded
        for found in self._alike:
            yield from found.block.paths

    def _mismatch(self) -> str:
        parts = []
        reshaped = [
            f"{name} (the target has shape {list(live)}, the checkpoint {list(stored)})"
            for name, stored, live in self.reshaped
        ]
        for what, names in (
            ("lacks", self.missing),
            ("has beyond the targets", self.unexpected),
            ("has in another shape", reshaped),
        ):
            if names:
                shown = ", ".join(names[:NAMES_SHOWN_MAX])
                more = f" and {len(names) - NAMES_SHOWN_MAX} more"
                more = more if len(names) > NAMES_SHOWN_MAX else ""
                parts.append(f"the checkpoint {what}: {shown}{more}")
        step = f"step {self.opened.step}"
        return f"{step} does not fit the targets: {'; '.join(parts)}; strict=False loads the rest"

    # pairing ---------------------------------------------------------------------------------

    def _fill(self, node: Any, live: Any, path: Path) -> tuple[Any, Any]:
        """What was loaded, and what belongs in the place of `live` (often `live` itself)."""
        if typed_json.tag_of(node) == "rank":
            node = self._own_node(path)
        if isinstance(live, PerRank):
            loaded, new = self._fill(node, live.value, path)
            self._calls.append(lambda: setattr(live, "value", new))
            return loaded, live
        if optimizer.is_module(live):
            return self._fill_module(node, optimizer.unwrap(live), path), live
        if is_stateful(live):
            if optimizer.is_optimizer(live):
                return self._fill_optimizer(node, live, path), live
            loaded = self._decode(node, path)
            self._calls.append(lambda: live.load_state_dict(copy_containers(loaded)))
            return loaded, live
        items = dict_items(node)
        if items is not None and isinstance(live, dict):
            return self._fill_dict(node, items, live, path), live
        if isinstance(node, list) and isinstance(live, list):
            return self._fill_list(node, live, path), live
        if typed_json.tag_of(node) == "tuple" and type(live) is tuple:
            pairs = self._fill_items(node["~tuple"], live, path)
            return tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)
        loaded = self._decode(node, path, live)
        return loaded, loaded

    def _fill_dict(self, node: Any, items: dict, live: dict, path: Path) -> dict:
        loaded = empty_dict(node)
        news = {}
        for text, child in items.items():
            key = typed_json.decode_key(text)
            loaded[key], news[key] = self._fill(child, live.get(key), (*path, key))
        self.missing += [format_path((*path, key)) for key in live if key not in loaded]
        self._calls.append(lambda: live.update(news) if type(live) is dict else _set(live, news))
        return loaded

    def _fill_list(self, node: list, live: list, path: Path) -> list:
        pairs = self._fill_items(node, live, path)
        new = [pair[1] for pair in pairs]
        self._calls.append(lambda: live.__setitem__(slice(None), new))
        return [pair[0] for pair in pairs]

    def _fill_items(self, node: list, live: Any, path: Path) -> list[tuple[Any, Any]]:
        return [
            self._fill(child, live[at] if at < len(live) else None, (*path, at))
            for at, child in enumerate(node)
        ]

    def _fill_module(self, node: Any, module: Any, path: Path) -> dict:
        items = dict_items(node)
        if items is None:
            raise InvalidArgument(f"{format_path(path)}: the checkpoint holds no module state here")
        live = module.state_dict()
        loaded: dict[typed_json.Key, Any] = {}
        by_module = has_hooks(module)
        new = Materialise(module)
        for text, child in items.items():
            key = typed_json.decode_key(text)
            mine = live.get(key)
            if key in live and dtypes.is_tensor(mine) and typed_json.tag_of(child) == "tensor":
                by_module |= is_lazy(mine)
                if is_lazy(mine):
                    mine = None
                elif is_meta(mine):
                    mine = new.tensor(str(key))
                loaded[key] = self._decode(child, (*path, key), mine)
            elif key in live or has_hooks(module):
                by_module = True
                loaded[key] = self._decode(child, (*path, key))
            else:
                self.unexpected.append(format_path((*path, key)))
        if not has_hooks(module):
            self.missing += [format_path((*path, key)) for key in live if key not in loaded]
        if new.needed:
            self._first.append(new.apply)
        if by_module:
            call = module.load_state_dict
            self._calls.append(lambda: call(copy_containers(loaded), strict=self.strict))
        return loaded

    def _drop_misfits(self, new: dict[str, Any], live: Any) -> None:
        """Leaves out the state of parameters that were left out for their shape."""
        reshaped = {name for name, _, _ in self.reshaped}
        for group, numbered in zip(live.param_groups, new.get("param_groups", [])):
            for parameter, number in zip(group["params"], numbered["params"]):
                owner = self._names.get(id(parameter))
                if owner is not None and format_path((*owner[0], owner[1])) in reshaped:
                    new["state"].pop(number, None)

    def _fill_optimizer(self, node: Any, live: Any, path: Path) -> dict:
        numbered = live.state_dict()
        groups = "param_groups" in numbered
        stored = optimizer.number_names(live, numbered, self._names) if groups else {}
        named = optimizer.to_names(numbered, stored) if groups else numbered
        self._parameters = optimizer.parameters_by_key(live, numbered, stored) if groups else {}
        self._loose = True
        try:
            loaded = self._decode(node, path, named)
        finally:
            self._loose, self._parameters = False, {}
        new = loaded
        if groups:
            new = optimizer.to_numbers(loaded, numbered, stored, path, self.strict)
        if not self.strict:
            self._calls.append(partial(self._drop_misfits, new, live))
        self._calls.append(lambda: live.load_state_dict(copy_containers(new)))
        return loaded

    # decoding --------------------------------------------------------------------------------

    def _decode(self, node: Any, path: Path, live: Any = None) -> Any:
        """Fresh values; tensors are those of `live` where they stand at the same place in it."""
        before, self._live = self._live, (len(path), live)
        try:
            return typed_json.decode(node, self._leaf, path)
        finally:
            self._live = before

    def _leaf(self, tag: str, content: Any, path: Path) -> Any:
        if tag == "tensor":
            return self._tensor(content, self._live_at(path), path)
        if tag == "rank":
            return typed_json.decode(self._own_node(path), self._leaf, path)
        if tag == "pickle":
            if not self.allow_pickle:
                raise Unsupported(
                    f"{format_path(path)}: a pickled value is not supported: pickles run code; if "
                    "you trust this checkpoint open the Checkpointer with allow_pickle=True"
                )
            return pickle.loads(typed_json.from_base64(content))
        raise Corrupt(f"{format_path(path)}: unknown tag ~{tag}; a newer version wrote it")

    def _live_at(self, path: Path) -> Any:
        depth, live = self._live
        for key in path[depth:]:
            try:
                live = live[key]
            except (KeyError, IndexError, TypeError):
                return None
        return live

    def _own_node(self, path: Path) -> Any:
        source = self.rank if self.rank < self.opened.world_size else 0
        if self._own is None:
            text = self.opened.per_rank_json(source)
            self._own = typed_json.loads(text) if text is not None else {}
        if source != self.rank:
            self.mapped[self.rank] = source
        try:
            return self._own[typed_json.path_json(path)]
        except KeyError:
            raise Corrupt(f"{format_path(path)}: no value of rank {source} is stored") from None

    def _tensor(self, content: dict, live: Any, path: Path) -> Any:
        if not (dtypes.is_tensor(live) or dtypes.is_array(live) or isinstance(live, Sharded)):
            live = None
        shape = tuple(content["shape"])
        place = (
            pieces.describe(live, self.rank, self.world_size, path) if live is not None else None
        )
        if place is not None and place.shape != shape:
            if not self._loose:
                self.reshaped.append((format_path(path), shape, place.shape))
                return live
            place = None
        if place is not None and dtypes.is_array(place.local) and not place.local.flags.writeable:
            place = None
        if place is None and (new := self._sharded_like(content, path)) is not None:
            live, place = new, pieces.describe(new, self.rank, self.world_size, path)
        if "data" in content:
            return self._inline(content, live if place else None, place)
        at: Path = tuple(content.get("at", path))
        self._loaded.append(path)
        if place is None:
            return self._fresh(content, at)
        self._add_fills(pieces.identity(place), content, at, place)
        return live

    def _add_fills(self, key: tuple, content: dict, at: Path, place: Place) -> None:
        holders = set(place.replicas or self.stage_ranks or ())
        self._fills[key] = fills_of(content, at, place, self._repeated(holders))

    def _repeated(self, holders: set[int]) -> bool:
        """Whether others on this machine read what these ranks hold; none given are all."""
        return bool(self.neighbours & holders if holders else self.neighbours)

    def _sharded_like(self, content: dict, path: Path) -> Any:
        """New optimizer state for a sharded parameter, spread as that is; None for any other.

        Torch's optimizers make it so, and refuse to mix whole tensors with sharded ones.
        """
        if len(path) < 2 or path[-1] == "step" or "lib" in content:
            return None
        parameter = self._parameters.get(path[-2])
        if parameter is None or not pieces.is_dtensor(parameter):
            return None
        if tuple(content["shape"]) != tuple(parameter.shape):
            return None
        return pieces.sharded_like(parameter, new_like(content, (), strided=False).dtype)

    def _fresh(self, content: dict, at: Path) -> Any:
        """A new whole tensor; values that were tied stay tied."""
        known = (*at, "~", str(content.get("pick"))) if "pick" in content else at
        if known not in self._whole:
            new = new_like(content)
            self._whole[known] = new
            place = Place(new, tuple(content["shape"]), (0,) * new.ndim, None)
            self._add_fills((id(new),), content, at, place)
        return self._whole[known]

    def _inline(self, content: dict, live: Any, place: Place | None) -> Any:
        buffer = new_like(content, strided=False)
        raw = typed_json.from_base64(content["data"])
        start, length = pieces.address(buffer)
        if len(raw) != length:
            raise ValueError(f"expected {length} bytes, found {len(raw)}")
        import ctypes

        # `buffer` is ours, contiguous, and exactly as long as `raw`
        ctypes.memmove(start, raw, length)
        if place is None:
            return buffer
        self._copies.append((place.local, buffer))
        return live


def is_lazy(tensor: Any) -> bool:
    """True for parameters that get their shape from the first forward pass."""
    from torch.nn.parameter import is_lazy as lazy

    return lazy(tensor)


def _set(live: dict, news: dict) -> None:
    # Counter.update would add to what is there
    for key, value in news.items():
        live[key] = value


def _tensor_of(array: Any) -> Any:
    import torch

    return torch.from_numpy(array)


def _count_writes(tensors: list[Any]) -> None:
    """The same for many; those of inference mode have no version."""
    from torch.autograd.graph import increment_version

    try:
        increment_version(tensors)
    except RuntimeError:
        for tensor in tensors:
            _count_write(tensor)


def _count_write(tensor: Any) -> None:
    """Tells autograd and version guards that the elements changed."""
    if not tensor.is_inference():
        from torch.autograd.graph import increment_version

        increment_version(tensor)
