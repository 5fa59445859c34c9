"""What a save writes of its tensors: all, what changed, and in which form."""

from typing import Any

from drivetrain._native import InvalidArgument

#: With delta=True a tensor is written anew after so many saves that referred to it: what must be
#: kept for one step reaches no further back, at a full write in 33 saves.
DELTA_SAVES = 32
DELTA_SAVES_MAX = 2**32 - 1


def delta_saves_max(delta: bool | int) -> int | None:
    """The limit that a user means, None for no references; `InvalidArgument` for what is none."""
    if isinstance(delta, bool):
        return DELTA_SAVES if delta else None
    if not isinstance(delta, int) or not 1 <= delta <= DELTA_SAVES_MAX:
        raise InvalidArgument(
            f"delta: expected True, False or a number of saves from 1 up, found {delta!r}"
        )
    return delta


def packing(compress: str | None, delta: bool | int) -> dict[str, Any]:
    """Arguments of the engine."""
    if compress not in (None, "planes-zstd"):
        raise InvalidArgument(f'compress: expected "planes-zstd" or None, found {compress!r}')
    return {"compress": compress is not None, "delta_saves_max": delta_saves_max(delta)}
