"""Sizes as people write them: ``"2GiB"``, ``"256 MB"``, or bytes as a number."""

from __future__ import annotations

import operator
import re

from drivetrain._native import InvalidArgument

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}


#: Largest number the engine takes for sizes and counts.
NUMBER_MAX = 2**63 - 1


def integer(value: object, name: str, least: int, most: int = NUMBER_MAX) -> int:
    """The whole number; `InvalidArgument` with the argument's `name` if it is none in range."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if not least <= number <= most:
        raise InvalidArgument(
            f"{name}: expected a whole number from {least} to {most}, found {value!r}"
        )
    return number


def size_bytes(value: str | int, name: str) -> int:
    """The size in bytes; `InvalidArgument` with the argument's `name` if it is none."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", value)
        unit = _UNITS.get(match[2].lower()) if match else None
        if match and unit:
            number = float(match[1]) * unit
            if number <= NUMBER_MAX:
                return int(number)
    elif not isinstance(value, bool):
        try:
            number = operator.index(value)
        except TypeError:
            number = -1
        if 0 <= number <= NUMBER_MAX:
            return number
    raise InvalidArgument(f'{name}: expected bytes or text such as "2GiB", found {value!r}')
