"""Where stored tensors go: into live memory directly where the bytes are the same, else aside."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from drivetrain._checkpoint import dtypes, pieces, typed_json
from drivetrain._checkpoint.pieces import Part, Place
from drivetrain._checkpoint.typed_json import Path

#: (path, dtype, global shape, offsets, extent, address, length in bytes)
NativeTarget = tuple[str, str, list[int], list[int], list[int], int, int]


@dataclass
class Fill:
    """Memory that one range of a stored tensor goes to."""

    path: Path
    dtype: str
    shape: list[int]
    offsets: list[int]
    extent: list[int]
    buffer: Any
    """Contiguous CPU tensor or array of the stored dtype."""
    live: Any
    """What the buffer is copied to afterwards; None when the buffer is the live memory itself."""
    repeated: bool = False
    """True when other ranks on this machine fill the same from the same bytes."""

    def native(self) -> NativeTarget:
        """The form the native reader takes."""
        path = typed_json.path_json(self.path)
        start, length = pieces.address(self.buffer)
        return path, self.dtype, self.shape, self.offsets, self.extent, start, length


def fills_of(content: dict, at: Path, place: Place, repeated: bool = False) -> list[Fill]:
    """The fills of a place: straight into its memory where the bytes are the same, else aside.

    A renamed tensor may be one row of a stored one, or a stack of several (see `renaming`).
    `repeated`: other ranks on this machine fill the same.
    """
    fills = []
    for part in place.parts:
        if "stack" not in content:
            fills.append(_fill_of(content, at, place.shape, part, content.get("pick")))
            continue
        for row, one in _rows(place.shape, part):
            source, pick = content["stack"][row]
            fills.append(_fill_of(content, tuple(source), place.shape[1:], one, pick))
    for fill in fills:
        fill.repeated = repeated
    return fills


def _rows(shape: tuple[int, ...], part: Part) -> Iterator[tuple[int, Part]]:
    """The rows of a stack that a part touches, and what it has of each."""
    if len(part.offsets) == len(shape):
        for index in range(part.extent[0]):
            rest = Part(part.local[index, ...], part.offsets[1:], part.extent[1:])
            yield part.offsets[0] + index, rest
        return
    size = math.prod(shape[1:])
    at, end = part.offsets[0], part.offsets[0] + part.extent[0]
    while at < end:
        row = at // size
        stop = min(end, (row + 1) * size)
        local = part.local[at - part.offsets[0] : stop - part.offsets[0]]
        yield row, Part(local, (at - row * size,), (stop - at,))
        at = stop


def _in_row(
    shape: tuple[int, ...], part: Part, pick: list[int] | None
) -> tuple[tuple[int, ...], Part]:
    """A part of row `pick[0]` of `pick[1]` rows as a part of all of them."""
    if pick is None:
        return shape, part
    row, rows = pick
    if len(part.offsets) == len(shape):
        inside = Part(part.local, (row, *part.offsets), (1, *part.extent))
    else:
        inside = Part(part.local, (part.offsets[0] + row * math.prod(shape),), part.extent)
    return (rows, *shape), inside


def _fill_of(
    content: dict, at: Path, shape: tuple[int, ...], part: Part, pick: list[int] | None
) -> Fill:
    whole, inside = _in_row(shape, part, pick)
    local, name, own = part.local, content["dtype"], content.get("own")
    direct = is_direct(local, name, own)
    buffer = local if direct else new_like(content, part.extent, strided=False)
    item_bytes = buffer.element_size() if dtypes.is_tensor(buffer) else buffer.itemsize
    extra_dim = item_bytes if dtypes.has_extra_dim(name, own, item_bytes) else None
    in_whole = inside.range_in(whole, extra_dim)
    return Fill(at, name, *in_whole, buffer, None if direct else local)


def is_direct(local: Any, name: str, own: Any) -> bool:
    """True when the stored bytes are the bytes of this memory."""
    if dtypes.is_array(local):
        return local.flags.c_contiguous and dtypes.numpy_name(local.dtype) == (name, own)
    if local.device.type != "cpu" or not local.is_contiguous():
        return False
    return dtypes.torch_name(local.dtype) == (name, own) and not (local.is_conj() or local.is_neg())


def new_like(content: dict, shape: tuple[int, ...] | None = None, strided: bool = True) -> Any:
    """A new tensor or array for a stored one: its dtype, shape and (on demand) order in memory."""
    shape = tuple(content["shape"]) if shape is None else shape
    name, own = content["dtype"], content.get("own")
    if content.get("lib") == "numpy":
        import numpy

        return numpy.empty(shape, dtypes.numpy_dtype(name, own))
    import torch

    dtype = dtypes.torch_dtype(name, own)
    if strided and "strides" in content:
        return torch.empty_strided(shape, content["strides"], dtype=dtype)
    return torch.empty(shape, dtype=dtype)


def dict_items(node: Any) -> dict[str, Any] | None:
    """The items of a node that stands for any kind of dict, else None."""
    tag = typed_json.tag_of(node)
    if tag is None:
        return node if isinstance(node, dict) else None
    if tag in ("odict", "counter"):
        return node["~" + tag]
    return node["~ddict"][1] if tag == "ddict" else None


def empty_dict(node: dict) -> dict:
    """An empty dict of the stored kind."""
    tag = typed_json.tag_of(node)
    if tag is None:
        return {}
    return typed_json.decode({f"~{tag}": [node["~ddict"][0], {}] if tag == "ddict" else {}})


def copy_containers(value: Any) -> Any:
    """The same leaves in new containers, so that their receiver may change them."""
    if isinstance(value, dict):
        new = empty_like(value)
        for key, item in value.items():
            new[key] = copy_containers(item)
        return new
    if type(value) in (list, tuple):
        return type(value)(copy_containers(item) for item in value)
    return value


def empty_like(value: dict) -> dict:
    """An empty dict of the same type and factory."""
    new = value.copy()
    new.clear()
    return new
