"""Tensors and arrays as named bytes: dtype names of safetensors, raw views, addresses.

What safetensors has no name for (other float8 kinds, structured or big-endian numpy) is stored as
bytes, with one more dimension where an element has several, and its own dtype beside it.
"""

import sys
from functools import cache
from typing import Any

from drivetrain._checkpoint import typed_json

#: numpy's names (kind and item size) of what safetensors can name, in this machine's byte order.
_NUMPY = {
    "b1": "BOOL",
    "u1": "U8",
    "i1": "I8",
    "u2": "U16",
    "i2": "I16",
    "f2": "F16",
    "u4": "U32",
    "i4": "I32",
    "f4": "F32",
    "u8": "U64",
    "i8": "I64",
    "f8": "F64",
    "c8": "C64",
    "c16": "C128",
}

_TORCH = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
    "complex128": "C128",
}


def loaded(name: str) -> Any:
    """The module if the program has imported it, else None; looking at types imports nothing."""
    return sys.modules.get(name)


def is_tensor(value: Any) -> bool:
    """True for torch tensors, without importing torch."""
    torch = loaded("torch")
    return torch is not None and isinstance(value, torch.Tensor)


@cache
def plain_classes() -> frozenset[type]:
    """The classes of tensors that are no more than their elements; needs torch."""
    import torch

    return frozenset((torch.Tensor, torch.nn.Parameter))


def is_array(value: Any) -> bool:
    """True for numpy arrays, without importing numpy."""
    numpy = loaded("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_masked(array: Any) -> bool:
    """True for masked arrays, whose elements alone are not their value."""
    module = loaded("numpy.ma")
    return module is not None and isinstance(array, module.MaskedArray)


@cache
def torch_name(dtype: Any) -> tuple[str, str | None]:
    """The stored name of a torch dtype, and its own name if it is stored as bytes."""
    own = str(dtype).removeprefix("torch.")
    return (_TORCH[own], None) if own in _TORCH else ("U8", own)


@cache
def torch_dtype(name: str, own: str | None) -> Any:
    """The torch dtype for what `torch_name` gave; `KeyError` for unknown names."""
    import torch

    if own is None:
        own = next((t for t, n in _TORCH.items() if n == name), name)
    dtype = getattr(torch, own, None)
    if not isinstance(dtype, torch.dtype):
        raise KeyError(f"this torch has no dtype {own}")
    return dtype


def numpy_name(dtype: Any) -> tuple[str, Any]:
    """The stored name of a numpy dtype, and its description if it is stored as bytes.

    Raises `ValueError` for dtypes that hold Python objects.
    """
    if dtype.hasobject:
        raise ValueError(f"numpy dtype {dtype} holds Python objects")
    if dtype.isnative and dtype.str[1:] in _NUMPY and dtype.names is None:
        return _NUMPY[dtype.str[1:]], None
    if dtype.kind == "V" and dtype.names is None and dtype.name in _TORCH:
        return _TORCH[dtype.name], dtype.name
    if dtype.kind == "V" and dtype.names is None and dtype.isbuiltin == 2:
        return "U8", dtype.name
    import numpy

    return "U8", typed_json.encode(numpy.lib.format.dtype_to_descr(dtype))


def numpy_dtype(name: str, own: Any) -> Any:
    """The numpy dtype for what `numpy_name` gave."""
    import numpy

    if isinstance(own, str) and own[0] not in "<>|=":
        return typed_json.numpy_dtype(own)
    if own is not None:
        return numpy.lib.format.descr_to_dtype(typed_json.decode(own))
    code = next((n for n, s in _NUMPY.items() if s == name), None)
    if code is None:
        return typed_json.numpy_dtype(next(t for t, s in _TORCH.items() if s == name))
    return numpy.dtype(code)


def has_extra_dim(stored: str, own: Any, item_bytes: int) -> bool:
    """True when elements are stored as `item_bytes` U8 each, along one more dimension."""
    return stored == "U8" and own is not None and item_bytes != 1


def tensor_bytes(tensor: Any) -> tuple[int, int]:
    """Address and length in bytes of a contiguous CPU tensor."""
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def array_bytes(array: Any) -> tuple[int, int]:
    """Address and length in bytes of a C-contiguous numpy array."""
    return array.__array_interface__["data"][0], array.nbytes
