"""Where stored tensors go: into live memory directly where the bytes are the same, else aside."""

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

    def native(self) -> NativeTarget:
        """The form the native reader takes."""
        path = typed_json.path_json(self.path)
        start, length = pieces.address(self.buffer)
        return path, self.dtype, self.shape, self.offsets, self.extent, start, length


def fills_of(content: dict, at: Path, place: Place) -> list[Fill]:
    """The fills of a place: straight into its memory where the bytes are the same, else aside."""
    return [_fill_of(content, at, place, part) for part in place.parts]


def _fill_of(content: dict, at: Path, place: Place, part: Part) -> Fill:
    local, name, own = part.local, content["dtype"], content.get("own")
    direct = is_direct(local, name, own)
    buffer = local if direct else new_like(content, part.extent, strided=False)
    item_bytes = buffer.element_size() if dtypes.is_tensor(buffer) else buffer.itemsize
    extra_dim = item_bytes if dtypes.has_extra_dim(name, own, item_bytes) else None
    in_whole = part.range_in(place.shape, extra_dim)
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
