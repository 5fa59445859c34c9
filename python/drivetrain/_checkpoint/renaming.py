"""Names that changed between a save and a restore: patterns or functions from saved to wanted.

A rename works on the stored tree before anything is paired with live tensors. A tensor node that
moves keeps the path of its bytes as ``at``. Layers that are stacked become one node whose ``stack``
lists where each slice lies; a slice of a stacked tensor is a node with its row as ``pick``. State
of an optimizer follows its parameters.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from drivetrain._checkpoint import optimizer, typed_json
from drivetrain._checkpoint.fills import dict_items
from drivetrain._checkpoint.typed_json import Key, Path, format_path
from drivetrain._native import InvalidArgument

#: What `restore(rename=…)` takes.
Rename = Callable[[str], str | Sequence[str] | None] | Mapping[str, str] | Iterable[tuple[str, str]]
#: Row of the saved tensor (None: all of it), name that is wanted
Move = tuple[int | None, str]
#: Row of the wanted tensor (None: all of it), path of what moves there, its node
Slot = tuple[int | None, Path, dict]

_TOKEN = re.compile(r"\{(\w+)\}|(\*)")
_ROW = re.compile(r"(.*)\[(\d+)\]")


def compiled(rename: Rename) -> Callable[[str, Sequence[int]], list[Move]]:
    """A function from a saved name and shape to what becomes of the tensor.

    Raises `InvalidArgument` for a pattern that cannot be one.
    """
    if callable(rename):
        return lambda name, shape: _called(rename, name, shape)
    pairs = rename.items() if isinstance(rename, Mapping) else rename
    patterns = [_Pattern.parse(saved, wanted) for saved, wanted in pairs]

    def moves(name: str, shape: Sequence[int]) -> list[Move]:
        for pattern in patterns:
            found = pattern.moves(name, shape)
            if found is not None:
                return found
        return [(None, name)]

    return moves


def _called(rename: Callable, name: str, shape: Sequence[int]) -> list[Move]:
    wanted = rename(name)
    if wanted is None:
        return []
    if isinstance(wanted, str):
        return [(None, wanted)]
    wanted = list(wanted)
    if not shape or len(wanted) != shape[0] or not all(isinstance(w, str) for w in wanted):
        raise InvalidArgument(
            f"rename({name!r}): expected a name, None, or one name per row of shape "
            f"{list(shape)}, found {wanted!r}"
        )
    return list(enumerate(wanted))


@dataclass(frozen=True)
class _Pattern:
    """``{name}`` is one part without dots, ``*`` any text, ``[{name}]`` at the end a row."""

    saved: re.Pattern
    row: str | None
    wanted: str

    @classmethod
    def parse(cls, saved: Any, wanted: Any) -> "_Pattern":
        if not isinstance(saved, str) or not isinstance(wanted, str):
            raise InvalidArgument(f"rename: expected two patterns, found {saved!r}: {wanted!r}")
        ending = re.search(r"\[\{(\w+)\}\]$", saved)
        row = ending.group(1) if ending else None
        body = saved[: ending.start()] if ending else saved
        seen: list[str] = []
        stars = 0
        text, at = "", 0
        for token in _TOKEN.finditer(body):
            text += re.escape(body[at : token.start()])
            at = token.end()
            name = token.group(1)
            if name is None:
                text, stars = text + "(.*)", stars + 1
            elif name in seen:
                text += f"(?P={name})"
            else:
                seen.append(name)
                text += rf"(?P<{name}>[^.\[\]]+)"
        text += re.escape(body[at:])
        known = {*seen, *([row] if row else [])}
        used = [t.group(1) for t in _TOKEN.finditer(wanted)]
        if used.count(None) > stars or any(u is not None and u not in known for u in used):
            raise InvalidArgument(
                f"rename: {wanted!r} uses a name or * that {saved!r} does not have"
            )
        try:
            return cls(re.compile(text), row, wanted)
        except re.error as error:
            raise InvalidArgument(f"rename: {saved!r} is no pattern: {error}") from None

    def moves(self, name: str, shape: Sequence[int]) -> list[Move] | None:
        match = self.saved.fullmatch(name)
        if match is None or (self.row is not None and not shape):
            return None
        named = match.groupdict()
        numbers = set(match.re.groupindex.values())
        stars = [g for i, g in enumerate(match.groups(), 1) if i not in numbers]
        if self.row is None:
            return [(None, self._fill(named, stars))]
        rows = range(shape[0])
        return [(i, self._fill({**named, self.row: str(i)}, stars)) for i in rows]

    def _fill(self, named: dict[str, str], stars: list[str]) -> str:
        left = iter(stars)
        return _TOKEN.sub(lambda t: next(left) if t.group(2) else named[t.group(1)], self.wanted)


@dataclass
class Renaming:
    """One rename of one stored tree, in place."""

    moves: Callable[[str, Sequence[int]], list[Move]]
    live: dict[str, Path]
    """Paths of live tensors by their dotted name."""
    missing: list[str] = field(default_factory=list)
    """Rows of stacked tensors that nobody saved."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Saved to wanted names, of what moves."""
    _whole: dict[str, tuple[list[Move], list[int]]] = field(default_factory=dict)
    _keys: dict[Key, list[str]] = field(default_factory=dict)

    def apply(self, tree: dict[str, Any], stored_keys: dict[Path, set[Key]]) -> None:
        """Moves tensors to where they are wanted.

        Args:
            tree: the stored state; changed in place.
            stored_keys: live optimizers by path, with the keys that their state is wanted by.
        """
        places: dict[str, list[Slot]] = {}
        optimizers: list[tuple[Path, dict]] = []
        for path, items, text, node in list(_tensors(tree, (), optimizers)):
            name, shape = format_path(path), node["~tensor"]["shape"]
            moves = self.moves(name, shape)
            self._whole[name] = (moves, shape)
            self._keys.setdefault(path[-1], []).append(name)
            if moves == [(None, name)]:
                continue
            del items[text]
            for pick, wanted in moves:
                base, row = self._row_of(wanted)
                places.setdefault(base, []).append((row, path, moved(node, path, pick)))
                self.renamed[name if pick is None else f"{name}[{pick}]"] = wanted
        for name, slots in places.items():
            joined = self._joined(name, slots)
            if joined is not None:
                self._insert(tree, name, joined)
        for path, node in optimizers:
            self._rename_optimizer(path, dict_items(node) or {}, stored_keys.get(path, set()))

    def _row_of(self, wanted: str) -> tuple[str, int | None]:
        found = None if wanted in self.live else _ROW.fullmatch(wanted)
        return (found.group(1), int(found.group(2))) if found else (wanted, None)

    def _joined(self, name: str, slots: list[Slot]) -> dict | None:
        """The node of a wanted tensor from what moves there; None if a row is missing."""
        numbered = {row: node for row, _, node in slots if row is not None}
        whole = len(slots) == 1 and not numbered
        if not whole and len(numbered) < len(slots):
            clash = ", ".join(format_path(path) for _, path, _ in slots)
            raise InvalidArgument(f"rename: {name} is wanted from more than one of: {clash}")
        if whole:
            return slots[0][2]
        holes = sorted(set(range(max(numbered) + 1)) - set(numbered))
        if holes:
            self.missing += [f"{name}[{row}]" for row in holes]
            return None
        return stacked(name, [numbered[row] for row in sorted(numbered)])

    def _insert(self, tree: dict[str, Any], name: str, node: dict) -> None:
        path = self._path_of(name)
        items = tree
        for key in path[:-1]:
            text = typed_json.encode_key(key, path)
            inner = dict_items(items.setdefault(text, {}))
            if inner is None:
                raise InvalidArgument(f"rename: {name}: the checkpoint has no dict in its place")
            items = inner
        text = typed_json.encode_key(path[-1], path)
        if text in items:
            raise InvalidArgument(f"rename: {name} is saved under that name and another one")
        items[text] = node

    # optimizers ------------------------------------------------------------------------------

    def _rename_optimizer(self, path: Path, items: dict, wanted: set[Key]) -> None:
        """State and groups by the names that their parameters moved to."""
        state = dict_items(items["state"]) or {}
        slots: dict[Key, list[tuple[int | None, Any]]] = {}
        for text in list(state):
            key = typed_json.decode_key(text)
            moves, shape = self._moves_of(key)
            if moves is None:
                continue
            content = state.pop(text)
            for pick, name in moves:
                base, row = self._row_of(name)
                node = _moved_state(content, (*path, "state", key), pick, shape)
                slots.setdefault(self._stored_key(base, wanted), []).append((row, node))
        for key, parts in slots.items():
            parts.sort(key=lambda part: -1 if part[0] is None else part[0])
            rows = [row for row, _ in parts]
            if rows in ([None], list(range(len(rows)))):
                state[typed_json.encode_key(key, path)] = _joined_state(key, parts)
        for group in items["param_groups"]:
            inner = dict_items(group) or {}
            new: dict[Key, None] = {}
            for key in inner["params"]:
                moves, _ = self._moves_of(key)
                bases = [key] if moves is None else [self._row_of(name)[0] for _, name in moves]
                keys = bases if moves is None else [self._stored_key(b, wanted) for b in bases]
                new.update(dict.fromkeys(keys))
            inner["params"] = list(new)

    def _moves_of(self, key: Key) -> tuple[list[Move] | None, list[int]]:
        """What becomes of a parameter, and its shape; no moves if it stays or nobody knows it."""
        if not isinstance(key, str):
            return None, []
        dotted = key.replace("/", ".")
        names = [dotted] if dotted in self._whole else self._keys.get(key, [])
        if len(names) != 1:
            return None, []
        moves, shape = self._whole[names[0]]
        return (None if moves == [(None, names[0])] else moves), shape

    def _stored_key(self, name: str, known: set[Key]) -> Key:
        """The key that a live optimizer has for a parameter of this name."""
        path = self._path_of(name)
        several = "/".join(str(key) for key in path)
        return several if several in known else path[-1]

    def _path_of(self, name: str) -> Path:
        """Where a tensor of this name stands, or would stand among the live ones."""
        if name in self.live:
            return self.live[name]
        parts = name.split(".")
        for depth in range(len(parts) - 1, 0, -1):
            container = self._containers.get(".".join(parts[:depth]))
            if container is not None:
                return (*container, ".".join(parts[depth:]))
        return tuple(name.split(".", 1))

    @cached_property
    def _containers(self) -> dict[str, Path]:
        return {format_path(path[:-1]): path[:-1] for path in self.live.values()}


def _tensors(node: Any, path: Path, optimizers: list) -> Iterable[tuple[Path, dict, str, dict]]:
    """Tensors that stand in dicts: path, the dict's items, their key there, the node."""
    items = dict_items(node)
    if items is None or typed_json.tag_of(node) == "tensor":
        return
    if path and _is_optimizer(items):
        optimizers.append((path, node))
        return
    for text, child in items.items():
        if not path and text.startswith("~"):
            continue
        here = (*path, typed_json.decode_key(text))
        if typed_json.tag_of(child) == "tensor":
            yield here, items, text, child
        else:
            yield from _tensors(child, here, optimizers)


def _is_optimizer(items: dict) -> bool:
    groups = items.get("param_groups")
    if "state" not in items or not isinstance(groups, list) or not groups:
        return False
    return all("params" in (dict_items(group) or {}) for group in groups)


def moved(node: dict, path: Path, pick: int | None) -> dict:
    """The node elsewhere: it says where its bytes are, and which row of them."""
    content = dict(node["~tensor"])
    content.setdefault("at", list(path))
    if pick is not None:
        content["pick"] = [pick, content["shape"][0]]
        content["shape"] = content["shape"][1:]
        content.pop("strides", None)
    return {"~tensor": content}


def stacked(name: str, nodes: list[dict]) -> dict:
    """One node of several: a new first dimension."""
    contents = [node["~tensor"] for node in nodes]
    first = contents[0]
    same = ("dtype", "shape", "own", "lib")
    for row, content in enumerate(contents):
        if any(content.get(key) != first.get(key) for key in same) or "data" in content:
            raise InvalidArgument(
                f"rename: {name}: row {row} is {content['dtype']} {content['shape']}, "
                f"row 0 is {first['dtype']} {first['shape']}"
            )
    made = {key: first[key] for key in same if key in first}
    made["shape"] = [len(contents), *first["shape"]]
    made["stack"] = [[content["at"], content.get("pick")] for content in contents]
    return {"~tensor": made}


def _joined_state(key: Key, parts: list[tuple[int | None, Any]]) -> Any:
    """State of one parameter from that of those it is made of, in the order of rows."""
    if parts[0][0] is None:
        return parts[0][1]
    items = [dict_items(node) or {} for _, node in parts]
    merged = {}
    for text, first in items[0].items():
        of_rows = [one[text] for one in items if one.get(text) is not None]
        tensor = typed_json.tag_of(first) == "tensor"
        if tensor and first["~tensor"]["shape"] and len(of_rows) == len(items):
            merged[text] = stacked(f"state of {key}, {text}", of_rows)
        else:  # a count of steps: that of the first layer
            merged[text] = first
    return merged


def _moved_state(node: Any, path: Path, pick: int | None, shape: list[int]) -> Any:
    """State of a parameter of a shape that moves; what has as many rows is split with it."""
    if typed_json.tag_of(node) == "tensor":
        own = node["~tensor"]["shape"]
        rows = len(own) > 1 or len(shape) == 1
        return moved(node, path, pick if rows and own[:1] == shape[:1] else None)
    items = dict_items(node)
    if items is None or typed_json.tag_of(node) is not None:
        return node
    return {
        text: _moved_state(child, (*path, typed_json.decode_key(text)), pick, shape)
        for text, child in items.items()
    }


def live_paths(targets: Any) -> dict[str, Path]:
    """Paths of the tensors in dicts and modules, by dotted name."""
    found: dict[str, Path] = {}

    def walk(value: Any, path: Path) -> None:
        if optimizer.is_module(value):
            for key in optimizer.unwrap(value).state_dict():
                found[format_path((*path, key))] = (*path, key)
        elif isinstance(value, dict):
            for key, item in value.items():
                walk(item, (*path, key))
        elif hasattr(value, "shape") or hasattr(value, "global_shape"):
            found[format_path(path)] = path

    walk(targets, ())
    return found
