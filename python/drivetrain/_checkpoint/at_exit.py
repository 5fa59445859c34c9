"""Saves on their way when the program ends without `close`."""

import atexit
import warnings
import weakref
from typing import Protocol


class Closable(Protocol):
    """What has an end of its own."""

    def must_close(self) -> bool:
        """Whether it is open, and of this process."""

    def close(self) -> None:
        """Ends it."""


def close_at_exit(checkpointer: Closable) -> None:
    """Waits for saves on their way when the program ends without `close`."""
    weak = weakref.ref(checkpointer)

    def close() -> None:
        alive = weak()
        if alive is None or not alive.must_close():
            return
        try:
            alive.close()
        except Exception as error:
            warnings.warn(f"checkpoint: {error}", RuntimeWarning, stacklevel=1)

    atexit.register(close)
    weakref.finalize(checkpointer, atexit.unregister, close)
