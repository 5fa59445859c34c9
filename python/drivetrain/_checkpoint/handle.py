"""A save on its way: what `Checkpointer.save` returns."""

import time
from collections.abc import Callable

from drivetrain import _native
from drivetrain._checkpoint.durations import seconds
from drivetrain._checkpoint.overlap import Overlap
from drivetrain._checkpoint.values import SavedBytes
from drivetrain._native import DeadlineExceeded, SaveSkipped

#: Ctrl-C is noticed between two waits of this length; a wait ends at once when the save does.
WAIT_SLICE_S = 0.2
#: `staged` waits so long for the first meeting of the ranks, which is under way then.
JOIN_WAIT_S = 10.0


class SaveHandle:
    """One save: staged when the call returned, committed or failed later.

    A failure nobody waited for is not lost: the next `save` or `close` reports it.
    """

    def __init__(
        self,
        step: int,
        native: _native.SaveHandle | None,
        staged_s: float = 0.0,
        error: Exception | None = None,
        on_seen: Callable[["SaveHandle"], None] | None = None,
        skipped: bool = False,
        overlap: Overlap | None = None,
        recopies: int = 0,
    ) -> None:
        self.step = step
        #: Copies that were thrown away because a tensor changed meanwhile.
        self.recopies = recopies
        self._native = native
        self._staged_s = staged_s
        self._error = error
        self._on_seen = on_seen
        self._committed: int | None = None
        self._skipped = skipped
        self._overlap = overlap

    def __repr__(self) -> str:
        state = "staged" if self._overlap is None else "being staged"
        if self.done():
            failed = self.failure() is not None
            state = "failed" if failed else "skipped" if self.skipped else "committed"
        return f"<save of step {self.step}: {state}>"

    def staged(self, timeout: str | float | None = None) -> float:
        """Seconds the trainer was stopped: collecting, waiting for a free slot, copying.

        The tensors may be changed now. With `staging="overlapped"` this waits for the copy, and the
        answer is the time for planning and for waiting. From now on the snapshot also
        outlives this process: if all ranks are killed, the next processes of the run adopt it. (At
        the first save of several ranks this waits until they have met once, which is no part of
        the answer.)

        Args:
            timeout: seconds or text, for that wait; None: 10 s.

        Raises what made the staging fail.
        """
        self._join_overlap(None if timeout is None else seconds(timeout, "timeout"))
        if self._overlap is not None:
            raise DeadlineExceeded(
                f"the copy of step {self.step} did not end within {timeout}; it goes on"
            )
        if self._native is None:
            self._raise()
        else:
            limit = JOIN_WAIT_S if timeout is None else seconds(timeout, "timeout")
            self._native.wait_joined(limit)
        return self._staged_s

    @property
    def bytes(self) -> SavedBytes | None:
        """What this rank's part of the save came to, with `delta`; None without, and until it is
        done."""
        if not self.done() or self._native is None:
            return None
        found = self._native.tally()
        return None if found is None else SavedBytes(*found)

    @property
    def skipped(self) -> bool:
        """True when the save was left out on all ranks, as `on_busy="skip"` asks for.

        Known when the save is done.
        """
        if self.done():
            self._settle()
        return self._skipped

    def done(self) -> bool:
        """True when the save is committed or has failed."""
        if self._overlap is not None and not self._overlap.finished():
            return False
        self._join_overlap(0.0)
        return self._native is None or self._settled() or self._native.done()

    def wait(self, timeout: str | float | None = None) -> int | None:
        """Waits for the commit and returns its step, or raises what made the save fail.

        None says that the save was skipped.

        Args:
            timeout: seconds or text such as "30s"; None waits as long as the save's own deadlines.

        Raises `DeadlineExceeded` if the save is still running then; it goes on.
        """
        limit = None if timeout is None else time.monotonic() + seconds(timeout, "timeout")
        while not self.done():
            left = WAIT_SLICE_S if limit is None else min(WAIT_SLICE_S, limit - time.monotonic())
            if left <= 0:
                raise DeadlineExceeded(
                    f"the commit of step {self.step} did not happen within {timeout}; it goes on, "
                    "wait again"
                )
            self.pause(left)
        self._settle()
        self._tell_seen()
        self._raise()
        return self._committed

    def pause(self, limit_s: float) -> None:
        """Waits until the save is done or the limit is over; how it ended is asked for later."""
        if self._overlap is not None:
            self._join_overlap(limit_s)
            return
        if self._native is None:
            return
        try:
            self._native.wait(limit_s)
        except (DeadlineExceeded, SaveSkipped):
            pass  # of this wait, or of the save itself, which is done then
        except Exception as error:
            self._error = error

    def failure(self) -> Exception | None:
        """What made a finished save fail; None if it was committed. Does not wait."""
        if self.done():
            self._settle()
        return self._error

    def _join_overlap(self, limit_s: float | None) -> None:
        """Waits for a copy in the background and takes over what came of it."""
        if self._overlap is None or not self._overlap.join(limit_s):
            return
        self._native, error, waited_s = self._overlap.outcome()
        self._overlap = None
        self._staged_s += waited_s
        if isinstance(error, SaveSkipped):
            self._skipped = True
        else:
            self._error = error

    def _settled(self) -> bool:
        return self._error is not None or self._committed is not None or self._skipped

    def _settle(self) -> None:
        """Keeps the result of a finished save."""
        if self._settled() or self._native is None:
            return
        try:
            self._committed = self._native.wait(0.0)
        except SaveSkipped:
            self._skipped = True
        except Exception as error:
            self._error = error

    def _tell_seen(self) -> None:
        callback, self._on_seen = self._on_seen, None
        if callback is not None:
            callback(self)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
