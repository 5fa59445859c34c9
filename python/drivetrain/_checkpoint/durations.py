"""Durations as people write them: ``"10min"``, ``"50ms"``, or seconds as a number."""

import math
import re

from drivetrain._native import InvalidArgument

_SECONDS = {
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "sec": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}


def seconds(value: str | float, name: str) -> float:
    """The duration in seconds; `InvalidArgument` with the argument's `name` if it is none."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        found = float(value)
    else:
        match = re.fullmatch(r"\s*([0-9.]+)\s*([a-z]+)\s*", str(value))
        unit = _SECONDS.get(match[2]) if match else None
        try:
            found = float(match[1]) * unit if match and unit else math.nan
        except ValueError:
            found = math.nan
    if not math.isfinite(found) or found < 0:
        raise InvalidArgument(f'{name}: expected seconds or text such as "10min", found {value!r}')
    return found
