"""A stager for `dcp.async_save` that never overwrites what is still being written."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.metadata import STATE_DICT_TYPE
from torch.distributed.checkpoint.staging import AsyncStager

from drivetrain._checkpoint.durations import seconds
from drivetrain._native import Closed, DeadlineExceeded

#: One copy is written while the next is made.
SLOTS = 2
#: Pause between looks at a slot whose copy is still in use.
POLL_S = 0.005


class _Slot:
    """Memory that one staged state occupies, re-used for the next of the same tensors."""

    def __init__(self, pinned: bool, shared: bool) -> None:
        self.stager = StateDictStager(pin_memory=pinned, share_memory=shared)
        self._handed_out: list[weakref.ref[torch.Tensor]] = []

    def is_free(self) -> bool:
        """True when nobody holds a tensor of the last copy any more."""
        self._handed_out = [ref for ref in self._handed_out if ref() is not None]
        return not self._handed_out

    def stage(self, state_dict: STATE_DICT_TYPE) -> STATE_DICT_TYPE:
        """A copy of the state in this slot's memory."""
        staged = self.stager.stage(state_dict, non_blocking=False)
        self._handed_out = [weakref.ref(tensor) for tensor in _tensors(staged)]
        return staged


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield getattr(value, "_local_tensor", value)
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner)


class Stager(AsyncStager):
    """Copies the state into memory that is kept between saves, in two slots.

    A slot is re-used only when nobody holds a tensor of its last copy: an upload that is slower
    than training delays the next save instead of writing a mixture of two states.

    Args:
        pinned: page-locked memory, which GPUs copy to faster; default: when CUDA is there.
        shared: memory that the process of `AsyncCheckpointerType.PROCESS` maps instead of copying.
        timeout: how long a save waits for a free slot, seconds or text such as "10min".
    """

    _synchronize_after_execute = False

    def __init__(
        self,
        *,
        pinned: bool | None = None,
        shared: bool = False,
        timeout: str | float = "10min",
    ) -> None:
        use_pinned = torch.cuda.is_available() if pinned is None else pinned
        self._slots = [_Slot(use_pinned, shared) for _ in range(SLOTS)]
        self._timeout_s = seconds(timeout, "timeout")
        self._lock = threading.Lock()
        self._closed = False

    def stage(self, state_dict: STATE_DICT_TYPE) -> STATE_DICT_TYPE:
        """A copy of `state_dict` that later training steps do not change."""
        with self._lock:
            if self._closed:
                raise Closed("the stager was closed")
            return self._free_slot().stage(state_dict)

    def _free_slot(self) -> _Slot:
        deadline = time.monotonic() + self._timeout_s
        while True:
            for slot in self._slots:
                if slot.is_free():
                    return slot
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"no staging slot became free within {self._timeout_s} s: wait for the future "
                    "of an earlier save, or check the storage"
                )
            time.sleep(POLL_S)

    def synchronize_staging(self) -> None:
        """Nothing to wait for: `stage` returns when the copy is complete."""

    def close(self) -> None:
        """Frees the slots' memory once nobody uses it."""
        with self._lock:
            self._closed = True
            for slot in self._slots:
                slot.stager.close()
