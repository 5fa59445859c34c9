"""A copy that runs beside the next forward and backward pass, and ends before the optimizer steps.

Parameters and optimizer state change in `Optimizer.step` and nowhere else, so copying them can wait
until then; everything else (buffers, plain tensors, counters, generators) was copied before `save`
returned. A hook that torch calls before any optimizer's step waits for the copy.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from drivetrain import _native
from drivetrain._checkpoint.dtypes import loaded

#: A wait looks for Ctrl-C this often.
JOIN_SLICE_S = 0.2


class Overlap:
    """The staging of one save in a thread of its own.

    Args:
        work: copies and hands the save to the writer.
    """

    def __init__(self, work: Callable[[], _native.SaveHandle]) -> None:
        self._work = work
        self._result: _native.SaveHandle | None = None
        self._error: Exception | None = None
        self._waited_s = 0.0
        self._hook: Any = None
        optimizers = loaded("torch.optim.optimizer")
        if optimizers is not None:
            self._hook = optimizers.register_optimizer_step_pre_hook(self._before_step)
        self._thread = threading.Thread(target=self._run, name="drivetrain-stage", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._work()
        except Exception as error:
            self._error = error
        finally:
            del self._work  # it keeps the tensors alive

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.join(None)

    def finished(self) -> bool:
        """Whether the copy is over. Does not wait."""
        return not self._thread.is_alive()

    def join(self, limit_s: float | None) -> bool:
        """Waits for the copy; false at the end of the time."""
        started = time.monotonic()
        while self._thread.is_alive():
            waited = time.monotonic() - started
            if limit_s is not None and waited >= limit_s:
                break
            left = JOIN_SLICE_S if limit_s is None else min(JOIN_SLICE_S, limit_s - waited)
            self._thread.join(left)
        self._waited_s += time.monotonic() - started
        return not self._thread.is_alive()

    def outcome(self) -> tuple[_native.SaveHandle | None, Exception | None, float]:
        """Of a finished copy: the save or why there is none, and the seconds waited for it."""
        # not in `join`, which torch calls while it goes through its hooks
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        return self._result, self._error, self._waited_s
