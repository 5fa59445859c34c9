"""From the values given to a save to what is stored: typed JSON, per-rank JSON, tensor parts.

A tensor in the tree is ``{"~tensor": {"dtype", "shape", …}}``; its bytes are found under the path
of that node, or under ``at`` when it is tied to an earlier one. A value per rank is
``{"~rank": true}`` and lies in the per-rank JSON under the same path.
"""

import base64
import pickle
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain._checkpoint import blocks, dtypes, pieces, typed_json
from drivetrain._checkpoint.optimizer import (
    Names,
    is_module,
    is_optimizer,
    number_names,
    parameter_names,
    to_names,
    unwrap,
)
from drivetrain._checkpoint.pieces import Part, Place
from drivetrain._checkpoint.typed_json import Key, Path, refuse
from drivetrain._checkpoint.values import PerRank, Sharded
from drivetrain._native import InvalidArgument

#: Larger per-rank tensors go to the rank's file; the rest travels inside the manifest.
INLINE_BYTES_MAX = 64 * 1024
#: First key of tensors that belong to one rank: [PER_RANK, rank, *path].
PER_RANK = "~rank"
#: Name of the generators' state among the values of a save.
RNG = "~rng"

#: (path, dtype, global shape, offsets, extent, address, length in bytes, replicas, pinned rank)
NativeTensor = tuple[str, str, list[int], list[int], list[int], int, int, list[int], int | None]


@dataclass
class Piece:
    """One rectangle to be written."""

    path: Path
    dtype: str
    place: Place
    extra_dim: int | None
    """Bytes of an element that is stored as U8 along one more dimension."""
    pin_rank: int | None


def is_stateful(value: Any) -> bool:
    """True for objects with `state_dict` and `load_state_dict`."""
    if isinstance(value, type):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def check_named(values: Any) -> None:
    """Refuses what is no dict of names to values."""
    if not isinstance(values, dict):
        found = type(values).__name__
        raise InvalidArgument(f'state: expected a dict such as {{"model": model}}, found {found}')


class Snapshot:
    """What one rank contributes to a save.

    Args:
        rank: of this process.
        world_size: ranks that save together.
        allow_pickle: store values of other types as pickles instead of refusing them.
        stage_ranks: the ranks that hold the same names; default: all.
        known: blocks of an earlier save by their path; None: nothing is taken as a block.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        allow_pickle: bool = False,
        stage_ranks: Sequence[int] | None = None,
        known: dict[Path, blocks.Block] | None = None,
    ) -> None:
        self.rank, self.world_size, self.allow_pickle = rank, world_size, allow_pickle
        self._everyone = list(range(world_size) if stage_ranks is None else stage_ranks)
        self.pieces: list[Piece] = []
        """All but what is in blocks."""
        self.found: list[blocks.Found] = []
        self._known_blocks = known
        self._addresses: set[int] = set()
        """Of torch tensors seen so far; those in blocks are not in `_known` until one returns."""
        self._spelled_out = 0
        self._pinned_in: dict[Path, frozenset[Key]] = {}
        self._state: dict[str, Any] = {}
        self._per_rank: dict[str, Any] = {}
        self._known: dict[tuple, Path] = {}
        self._pinned: set[Path] = set()
        self._steady: set[int] = set()
        """Storages that only an optimizer's step changes; with blocks nobody asks."""
        self._names: Names = {}
        self._inside_per_rank = False

    def add_all(self, values: dict[str, Any]) -> None:
        """Takes the named values in; `Unsupported` names the path of one that cannot be stored."""
        check_named(values)
        self._names = parameter_names(values)
        for name, value in values.items():
            if type(name) is not str or name.startswith("~"):
                raise refuse(name, (), "names of saved values are strings that do not start with ~")
            self._state[name] = typed_json.encode(value, self._leaf, (name,))

    def add_rng(self, state: dict[str, Any]) -> None:
        """Takes the generators of this rank in."""
        self._state[RNG] = typed_json.encode(PerRank(state), self._leaf, (RNG,))

    def state_json(self) -> str:
        """Typed JSON of everything but tensor bytes and per-rank values; equal on all ranks."""
        return (typed_json.dumps_with_texts if self.found else typed_json.dumps)(self._state)

    def per_rank_json(self) -> str:
        """Typed JSON of this rank's own values, keyed by their path."""
        return typed_json.dumps(self._per_rank)

    def _leaf(self, value: Any, path: Path) -> Any:
        if isinstance(value, PerRank):
            return self._encode_per_rank(value, path)
        if type(value) in typed_json.PLAIN:
            return self._encode_block(value, path)
        place = pieces.describe(value, self.rank, self.world_size, path)
        if place is not None:
            return self._encode_tensor(value, place, path)
        if is_stateful(value):
            return typed_json.encode(self._state_of(value, path), self._leaf, path)
        if self.allow_pickle and not typed_json.is_library_value(value):
            content = pickle.dumps(value)
            return {"~pickle": base64.b64encode(content).decode("ascii")}
        return None

    def _encode_block(self, value: Any, path: Path) -> Any:
        """The text of a tree of dicts of plain tensors; None for anything else."""
        kind = type(value)
        if self._known_blocks is None or self._inside_per_rank or not path:
            return None
        if kind is not dict and kind is not OrderedDict:
            return None
        pinned = self._pinned_in.get(path, frozenset())
        known = self._known_blocks.get(path)
        found = blocks.find(dict(value), path, self._everyone, known, pinned)
        if found is None:
            return None
        if not self._addresses.isdisjoint(found.addresses):
            self._spell_out()  # tied to something outside: the general way says to what
            return None
        self._addresses.update(found.addresses)
        self.found.append(found)
        text = found.block.text
        return typed_json.Text(text if kind is dict else f'{{"~odict":{text}}}')

    def _spell_out(self) -> None:
        """Makes the tensors of blocks known one by one, for what is tied to them."""
        for found in self.found[self._spelled_out :]:
            for path, tensor in zip(found.block.paths, found.tensors):
                shape = tuple(tensor.shape)
                place = Place(tensor, shape, (0,) * len(shape), None)
                self._known.setdefault(pieces.identity(place), path)
        self._spelled_out = len(self.found)

    def _state_of(self, value: Any, path: Path) -> Any:
        if is_module(value):
            module = unwrap(value)
            buffers = [name for name, _ in module.named_buffers(remove_duplicate=False)]
            # DDP broadcasts rank 0's buffers before each forward and lets the others drift until
            # then (running statistics of batch norm), so they may differ and must not be mixed.
            self._pinned.update((*path, name) for name in buffers)
            self._pinned_in[path] = frozenset(buffers)
            if self._known_blocks is None:
                self._steady.update(pieces.storage(p) for p in module.parameters())
            return dict(module.state_dict())
        if is_optimizer(value) and self._known_blocks is None:
            slots = (slot for slots in value.state.values() for slot in slots.values())
            self._steady.update(pieces.storage(slot) for slot in slots if dtypes.is_tensor(slot))
        state = value.state_dict()
        if is_optimizer(value) and self._names and "param_groups" in state:
            return to_names(state, number_names(value, state, self._names))
        return state

    def _encode_per_rank(self, value: PerRank, path: Path) -> Any:
        if self._inside_per_rank:
            raise refuse(value, path, "a PerRank inside another adds nothing; remove the inner one")
        self._inside_per_rank = True
        try:
            node = typed_json.encode(value.value, self._leaf, path)
        finally:
            self._inside_per_rank = False
        self._per_rank[typed_json.path_json(path)] = node
        return {"~rank": True}

    def _encode_tensor(self, value: Any, place: Place, path: Path) -> Any:
        content, piece = self._reference(place, path)
        if isinstance(value, Sharded):
            content["sharded"] = True
        if self._inside_per_rank:
            return self._encode_own_tensor(content, piece, path)
        self._meet(place.local)
        first = self._known.setdefault(pieces.identity(place), path)
        if first != path:
            content["at"] = list(first)
        else:
            self.pieces.append(piece)
        return {"~tensor": content}

    def _meet(self, local: Any) -> None:
        if self._known_blocks is None or not dtypes.is_tensor(local):
            return
        address = local.data_ptr()
        if address in self._addresses:
            self._spell_out()
        elif address:
            self._addresses.add(address)

    def _encode_own_tensor(self, content: dict, piece: Piece, path: Path) -> Any:
        """A tensor inside a PerRank: this rank's alone, whole, never tied."""
        place = piece.place
        if not place.whole:
            raise refuse(place.local, path, "a sharded tensor inside PerRank; take it out")
        local = pieces.contiguous_cpu(place.local)
        start, length = pieces.address(local)
        if length <= INLINE_BYTES_MAX:
            raw = _copy_bytes(local, start, length)
            content["data"] = base64.b64encode(raw).decode("ascii")
        else:
            at: Path = (PER_RANK, self.rank, *path)
            content["at"] = list(at)
            place.replicas = (self.rank,)
            self.pieces.append(Piece(at, piece.dtype, place, piece.extra_dim, None))
        return {"~tensor": content}

    def _reference(self, place: Place, path: Path) -> tuple[dict[str, Any], Piece]:
        local = place.local
        is_array = dtypes.is_array(local)
        try:
            stored, own = (dtypes.numpy_name if is_array else dtypes.torch_name)(local.dtype)
        except ValueError as error:
            raise refuse(local, path, str(error)) from None
        item_bytes = local.itemsize if is_array else local.element_size()
        content: dict[str, Any] = {"dtype": stored, "shape": list(place.shape)}
        if is_array:
            content["lib"] = "numpy"
        if own is not None:
            content["own"] = own
        if not is_array and place.whole and (strides := pieces.dense_strides(local)) is not None:
            content["strides"] = list(strides)
        extra = item_bytes if dtypes.has_extra_dim(stored, own, item_bytes) else None
        pin = self._everyone[0] if path in self._pinned else None
        return content, Piece(path, stored, place, extra, pin)

    def steady_pieces(self) -> list[Piece]:
        """The parts that only an optimizer's step changes: parameters and optimizer state."""
        return [piece for piece in self.pieces if self._is_steady(piece)]

    def other_pieces(self) -> list[Piece]:
        """The rest, which a forward pass may change, too."""
        return [piece for piece in self.pieces if not self._is_steady(piece)]

    def _is_steady(self, piece: Piece) -> bool:
        local = piece.place.local
        return dtypes.is_tensor(local) and pieces.storage(local) in self._steady

    def copy_others(self) -> None:
        """Puts copies in the place of all that is not steady."""
        for piece in self.other_pieces():
            piece.place.local = pieces.copied(piece.place.local)

    def native_tensors(self) -> tuple[list[NativeTensor], list[Any]]:
        """The parts as the native save takes them, and what must stay alive while it runs."""
        alive, tensors = [], []
        for piece in self.pieces:
            for part in piece.place.parts:
                local = pieces.contiguous_cpu(part.local)
                alive.append(local)
                tensors.append(self._native(piece, part, *pieces.address(local)))
        return tensors, alive

    def _native(self, piece: Piece, part: Part, start: int, length: int) -> NativeTensor:
        place = piece.place
        replicas = place.replicas if place.replicas is not None else self._everyone
        return (
            typed_json.path_json(piece.path),
            piece.dtype,
            *part.range_in(place.shape, piece.extra_dim),
            start,
            length,
            list(replicas),
            piece.pin_rank,
        )


def _copy_bytes(local: Any, start: int, length: int) -> bytes:
    import ctypes

    # `local` is alive in this frame, contiguous, and `length` long
    return ctypes.string_at(start, length) if length else b""
