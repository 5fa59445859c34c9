"""How a field of a batch is wanted: `Image` and `Points`."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain._native import InvalidArgument
from drivetrain._sizes import integer

#: What the native loader takes: names with None or the form's values.
Requests = list[tuple[str, dict[str, Any] | None]]

#: Largest coordinate that fits the engine's numbers; its own limits are tighter.
PIXELS_MAX = 2**32 - 1
#: The same for counts of sweeps and points.
COUNT_MAX = 2**32 - 1


@dataclass(frozen=True)
class Image:
    """A picture field decoded, resized and normalised straight into the batch.

    The batch has (B, 3, H, W) for layout "CHW" or (B, H, W, 3) for "HWC". Values are
    ``(level - mean) / std`` with RGB levels from 0 to 255.

    Attributes:
        size: (height, width) in pixels; None keeps the size after the crop.
        crop: (y, x, height, width) in pixels of the stored picture, taken before resizing.
        mean: One number, or three for R, G, B, in levels (0 to 255); None is 0.
        std: One number, or three, in levels; None is 1.
        dtype: "float32", "float16", "bfloat16" or "uint8" (without mean and std); torch and numpy
            dtypes are understood too.
        layout: "CHW" or "HWC".
        exact: Decode at full resolution even where a smaller, cheaper decode would do.
    """

    size: tuple[int, int] | None = None
    crop: tuple[int, int, int, int] | None = None
    mean: float | Sequence[float] | None = None
    std: float | Sequence[float] | None = None
    dtype: Any = "float32"
    layout: str = "CHW"
    exact: bool = False


@dataclass(frozen=True)
class Points:
    """A point cloud field: the keyframe and earlier sweeps in the keyframe's sensor frame.

    With ragged="offsets" the batch has ``batch[f]`` (ΣN, C) float32 and ``batch[f + "_offsets"]``
    (B + 1,) int64; with ragged="pad" ``batch[f]`` (B, max_points, C), zeros after each cloud's
    points, and ``batch[f + "_count"]`` (B,) int64.

    Attributes:
        sweeps: Earlier sweeps to add, as far as there are any.
        range: (x_min, y_min, z_min, x_max, y_max, z_max) in metres in the keyframe's sensor frame;
            points strictly inside stay. None keeps all.
        columns: Output columns by name; None is all of the file, then "dt_s", the seconds from the
            point's sweep to the keyframe.
        remove_close_m: Drop points of earlier sweeps with |x| and |y| below this in their own
            frame: returns from the car itself.
        ragged: "offsets" or "pad".
        max_points: Points per cloud with "pad"; clouds with more keep their first ones.
    """

    sweeps: int = 0
    range: Sequence[float] | None = None
    columns: Sequence[str] | None = None
    remove_close_m: float | None = None
    ragged: str = "offsets"
    max_points: int | None = None


def _triple(value: Any, default: float, name: str) -> tuple[float, ...]:
    if value is None:
        return (default,) * 3
    if isinstance(value, (int, float)):
        return (float(value),) * 3
    return _floats(value, 3, name, "1 or 3 numbers")


def _floats(value: Any, count: int, name: str, expected: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(v) for v in value)
    except (TypeError, ValueError, OverflowError):
        numbers = ()
    if len(numbers) != count:
        raise InvalidArgument(f"{name}: expected {expected}, found {value!r}")
    return numbers


def _integers(value: Any, count: int, name: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    try:
        numbers = tuple(operator.index(v) for v in value)
    except TypeError:
        numbers = ()
    if len(numbers) != count or min(numbers) < 0 or max(numbers) > PIXELS_MAX:
        raise InvalidArgument(
            f"{name}: expected {count} integers from 0 to {PIXELS_MAX}, found {value!r}"
        )
    return numbers


def _dtype_name(dtype: Any) -> str:
    if isinstance(dtype, str):
        return dtype
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    return str(name).removeprefix("torch.")


def _image(form: Image, name: str) -> dict[str, Any]:
    return {
        "kind": "image",
        "size": _integers(form.size, 2, f"{name}: size"),
        "crop": _integers(form.crop, 4, f"{name}: crop"),
        "mean": _triple(form.mean, 0.0, f"{name}: mean"),
        "std": _triple(form.std, 1.0, f"{name}: std"),
        "dtype": _dtype_name(form.dtype),
        "layout": str(form.layout),
        "exact": bool(form.exact),
    }


def _points(form: Points, name: str) -> dict[str, Any]:
    limits, close, most = form.range, form.remove_close_m, form.max_points
    if limits is not None:
        limits = _floats(limits, 6, f"{name}: range", "6 numbers")
    if close is not None:
        (close,) = _floats([close], 1, f"{name}: remove_close_m", "metres")
    if most is not None:
        most = integer(most, f"{name}: max_points", 0, COUNT_MAX)
    return {
        "kind": "points",
        "sweeps": integer(form.sweeps, f"{name}: sweeps", 0, COUNT_MAX),
        "range": limits,
        "columns": None if form.columns is None else _names(form.columns, f"{name}: columns"),
        "remove_close_m": close,
        "ragged": str(form.ragged),
        "max_points": most,
    }


def _names(value: Any, name: str) -> list[str]:
    names = [] if isinstance(value, str) else list(value)
    if isinstance(value, str) or not all(isinstance(one, str) for one in names):
        raise InvalidArgument(f"{name}: expected a list of names, found {value!r}")
    return names


def native_fields(fields: Mapping[str, Any] | Sequence[str] | None) -> Requests | None:
    """Requests as the native loader takes them: (name, None or a dict).

    A mapping's values are `Image`, `Points` or None for the natural form; a sequence of names asks
    for natural forms.
    """
    if fields is None:
        return None
    if not isinstance(fields, Mapping):
        fields = dict.fromkeys(fields)
    native: Requests = []
    for name, form in fields.items():
        if form is None:
            native.append((name, None))
        elif isinstance(form, Image):
            native.append((name, _image(form, name)))
        elif isinstance(form, Points):
            native.append((name, _points(form, name)))
        else:
            raise InvalidArgument(
                f"fields: {name}: expected dt.Image, dt.Points or None, found {form!r}"
            )
    return native
