"""Detects tensors that change while a save copies them.

``"version"`` compares torch's version counters, which every in-place operation of torch raises.
They do not see writes through ``tensor.data``, numpy views of a tensor, custom kernels that skip
them, or any write to a numpy array. ``"checksum"`` reads the bytes once before and once after
the copy and sees those too, at about the price of two more copies.
"""

import ctypes
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from drivetrain._checkpoint import dtypes, pieces
from drivetrain._checkpoint.blocks import Found
from drivetrain._checkpoint.tree import NativeTensor, Piece
from drivetrain._checkpoint.typed_json import Path, format_path
from drivetrain._native import Corrupt, InvalidArgument, TensorRows

MODES = ("version", "checksum", None)
#: zlib gives the GIL away for buffers above some KiB, so other threads run while one is hashed.
HASH_BYTES = 64 * 1024 * 1024


class Guard:
    """Remembers what the sources were before the copy; `check` compares."""

    def __init__(
        self, sources: Iterable[Piece], mode: str | None, found: Iterable[Found] = ()
    ) -> None:
        self._mode = mode
        #: Whether a check has found a change.
        self.changed = False
        blocks = list(found) if mode is not None else []
        self._blocks = [(one, self._marks(one.tensors)) for one in blocks]
        pairs = [(piece.path, piece.place.local) for piece in sources if mode is not None]
        self._before = [(path, local, self._mark(local)) for path, local in pairs]

    def check(self) -> None:
        """Raises `Corrupt` with the first tensor that changed since."""
        for path, local, before in self._before:
            if self._mark(local) != before:
                raise self._changed(path)
        for one, marks in self._blocks:
            now = self._marks(one.tensors)
            if now != marks:
                number = next(i for i, mark in enumerate(marks) if now[i] != mark)
                raise self._changed(one.block.paths[number])

    def _changed(self, path: Path) -> Corrupt:
        self.changed = True
        return Corrupt(
            f"{format_path(path)}: expected no change while it was copied for the checkpoint, "
            "found one; nothing is committed, save between two steps and not while another thread "
            "or stream trains"
        )

    def _marks(self, tensors: list[Any]) -> list[int]:
        if self._mode == "version":
            try:
                return list(map(type(tensors[0])._version.__get__, tensors))
            except RuntimeError:  # inference tensors have no version
                pass
        return list(map(self._mark, tensors))

    def _mark(self, local: Any) -> int:
        if self._mode == "checksum":
            return checksum(local)
        if not dtypes.is_tensor(local) or local.is_inference():
            return 0
        return local._version


@dataclass
class Collected:
    """All that a save hands to the native side."""

    guard: Guard
    tensors: list[NativeTensor]
    alive: list[Any]
    """Keeps the tensors' memory: copies of those that are not contiguous in CPU memory."""
    state_json: str
    per_rank_json: str
    blocks: list[tuple[TensorRows, list[int]]]
    """Dicts of plain tensors that were described before, and their addresses now."""


def check_mode(mode: str | None) -> str | None:
    """The mode, or `InvalidArgument`."""
    if mode not in MODES:
        raise InvalidArgument(f'guard: expected "version", "checksum" or None, found {mode!r}')
    return mode


def checksum(local: Any) -> int:
    """CRC-32 of the elements, row-major."""
    same = pieces.contiguous_cpu(local)
    start, length = pieces.address(same)
    value = 0
    for at in range(0, length, HASH_BYTES):
        # `same` is alive, contiguous and `length` bytes long
        size = min(HASH_BYTES, length - at)
        value = zlib.crc32((ctypes.c_char * size).from_address(start + at), value)
    return value
