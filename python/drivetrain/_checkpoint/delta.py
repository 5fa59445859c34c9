"""How often in a row a save may refer to what an earlier one wrote."""

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
