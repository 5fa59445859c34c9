"""Preemption: a signal that says the machine will be taken away soon.

The kernel writes the signal's number to a pipe, whatever the main thread is doing (it may be inside
a collective for a long time, and Python's own handlers run only between its instructions). A
thread of ours reads it, tells the other ranks through the checkpointer's meeting place, and all
ranks agree on the step at which `should_stop` turns true, so that none waits in a collective for
one that has left.

How they agree: `should_stop` is read once per step, and each rank counts the readings. A rank that
hears of the signal promises not to go past a reading a little ahead of its own before there is a
decision; rank 0 collects the promises and decides for the largest. Nobody is past it, and nobody
needs the training's own communication to get there: promises are made by the thread.
"""

import contextlib
import os
import select
import signal
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from drivetrain._checkpoint.durations import seconds
from drivetrain._native import DrivetrainError, InvalidArgument

if TYPE_CHECKING:
    from drivetrain._checkpoint.checkpointer import Checkpointer

#: Pause between looks for another rank's signal; a look is one short request per rank.
POLL_S = 0.5
#: Pause between looks once a signal was heard.
POLL_HEARD_S = 0.05
#: Readings that a rank may still make, after it heard of a signal, before there is a decision.
AHEAD = 2
#: Longest flush when the grace is over; whoever sent the signal usually waits less.
FLUSH_S = 600.0
#: Longest wait for the thread when it is taken down.
JOIN_S = 5.0


class Preemption:
    """Installed signal handlers of one `Checkpointer`; see `Checkpointer.preemption`."""

    def __init__(
        self, checkpointer: "Checkpointer", signals: Sequence[str | int], grace: str | float
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise InvalidArgument("preemption: expected the main thread, which gets the signals")
        self._numbers = [_number(name) for name in signals]
        self._grace_s = seconds(grace, "grace")
        self._native = checkpointer._native
        self._pending: Callable[[], list[Any]] = lambda: list(checkpointer._pending)
        self._rank, self._world_size = checkpointer.rank, checkpointer.world_size
        # Every rank installs, so that all have met before anyone has something to say.
        self._native.agree("preemption", ",".join(map(str, self._numbers)))
        self._changed = threading.Condition()
        self._readings = 0
        self._promise: int | None = None
        self._stop_at: int | None = None
        self._seen = False
        self._heard_at: float | None = None
        self._received: int | None = None
        self._ended = False
        self._install()
        self._thread = threading.Thread(target=self._run, name="drivetrain-preempt", daemon=True)
        self._thread.start()

    @property
    def received(self) -> int | None:
        """Number of the signal that this process got; None while it got none."""
        return self._received

    def should_stop(self) -> bool:
        """Whether to stop after this step; the same on all ranks for the same reading.

        Waits only when a rank got a signal and the ranks have not agreed yet, `grace` at most.
        """
        with self._changed:
            self._readings += 1
            if self._promise is None or (self._stop_at is None and self._readings < self._promise):
                return False
            if not self._changed.wait_for(lambda: self._stop_at is not None, self._grace_s):
                warnings.warn(
                    "preemption: the ranks did not agree on a step in time; this one stops now",
                    RuntimeWarning,
                    stacklevel=3,
                )
                self._stop_at = self._readings
            self._seen = self._readings >= (self._stop_at or 0)
            return self._seen

    def uninstall(self) -> None:
        """Puts the old handlers back. A second call does nothing."""
        if self._ended:
            return
        self._ended = True
        self._stop_listening()
        os.write(self._pipe[1], b"\0")
        self._thread.join(JOIN_S)
        if self._thread.is_alive():
            return
        for end in self._pipe:
            os.close(end)
        if self._rank == 0 and self._promise is not None and self._world_size > 1:
            with contextlib.suppress(DrivetrainError):  # a rank that is gone, most likely
                self._remove_notes()

    def _remove_notes(self) -> None:
        limit = time.monotonic() + JOIN_S
        others = range(1, self._world_size)
        while any(self._note(f"promise-{r}") for r in others) and time.monotonic() < limit:
            time.sleep(POLL_HEARD_S)
        for name in ("promise-0", "signal", "stop"):
            self._native.remove_note(name)

    def _install(self) -> None:
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        self._old = {number: signal.signal(number, self._handle) for number in self._numbers}
        self._old_wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        if self._old_wakeup != -1:  # asyncio's, for one: then we hear when Python does
            signal.set_wakeup_fd(self._old_wakeup)

    def _stop_listening(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may; the handler then does no more than chain
        if self._old_wakeup == -1 and (now := signal.set_wakeup_fd(-1)) != self._pipe[1]:
            signal.set_wakeup_fd(now)
        for number, old in self._old.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, old if old is not None else signal.SIG_DFL)

    def _handle(self, number: int, frame: Any) -> None:
        """Runs in the main thread between two instructions: takes no lock."""
        if self._old_wakeup != -1 and not self._ended:
            os.write(self._pipe[1], bytes([number]))
        old = self._old.get(number)
        if callable(old):
            old(number, frame)

    def _run(self) -> None:
        while not self._ended:
            pause_s = POLL_S if self._promise is None else POLL_HEARD_S
            ready, _, _ = select.select([self._pipe[0]], [], [], pause_s)
            if ready:
                for number in os.read(self._pipe[0], 512):
                    if number in self._numbers and self._received is None:
                        self._received = number
            try:
                self._talk()
            except DrivetrainError as error:
                # `should_stop` has a deadline of its own; a rank that is gone stops everybody
                if self._promise is not None and not self._ended:
                    warnings.warn(f"preemption: {error}", RuntimeWarning, stacklevel=1)
                    self._decide(self._promise)
            if self._heard_at is not None and time.monotonic() - self._heard_at > self._grace_s:
                self._end_by_default()
                return

    def _talk(self) -> None:
        """One round: hear, promise, decide, hear the decision."""
        if self._promise is None:
            if self._received is None and (self._world_size == 1 or not self._note("signal")):
                return
            self._heard_at = time.monotonic()
            with self._changed:
                self._promise = self._readings + AHEAD
            if self._world_size == 1:
                self._decide(self._readings + 1)
                return
            # a promise has to be there before the word of the signal is: rank 0 waits for it
            self._native.put_note(f"promise-{self._rank}", str(self._promise))
            self._native.put_note("signal", str(self._received or 0))
        if self._stop_at is not None:
            return
        if self._rank == 0:
            promises = [self._note(f"promise-{rank}") for rank in range(self._world_size)]
            if all(promises):
                self._native.put_note("stop", str(max(int(text) for text in promises if text)))
        if text := self._note("stop"):
            self._decide(int(text))
            if self._rank != 0:  # which tells rank 0 that the decision was read
                self._native.remove_note(f"promise-{self._rank}")

    def _note(self, name: str) -> str | None:
        return self._native.note(name)

    def _decide(self, reading: int) -> None:
        with self._changed:
            if self._stop_at is None:
                self._stop_at = reading
            self._changed.notify_all()

    def _end_by_default(self) -> None:
        """The grace is over and the loop has not looked: what was staged is flushed, and the
        signal gets the default action that it would have had."""
        default = self._received is not None and self._old.get(self._received) == signal.SIG_DFL
        if not default or self._seen or self._received is None:
            return
        for handle in self._pending():
            handle.pause(FLUSH_S)
        # Not by signal.signal, which only the main thread may call and which may never come to it.
        os._exit(128 + self._received)


def _number(name: str | int) -> int:
    try:
        return int(signal.Signals[name] if isinstance(name, str) else signal.Signals(name))
    except (KeyError, ValueError):
        raise InvalidArgument(
            f'signals: expected names such as "SIGTERM", found {name!r}'
        ) from None
