"""Batches as dicts of tensors or arrays that wrap the native memory without a copy."""

from __future__ import annotations

import math
from typing import Any

from drivetrain import _native
from drivetrain._values import wrap


class NumpyMaker:
    """Makes numpy arrays."""

    def __init__(self) -> None:
        import numpy

        self._np = numpy

    def _dtype(self, name: str) -> Any:
        if name != "bfloat16":
            return self._np.dtype(name)
        try:
            import ml_dtypes
        except ImportError:
            raise _native.Unsupported(
                "dtype bfloat16 in numpy is not supported: install ml_dtypes, or choose "
                'float32, float16 or output="torch"'
            ) from None
        return self._np.dtype(ml_dtypes.bfloat16)

    def check(self, dtypes: set[str]) -> None:
        """Refuses dtypes that cannot be made, before anything is read."""
        for name in dtypes:
            self._dtype(name)

    def array(
        self, buffer: Any, offset: int, shape: list[int], stride: int | None, dtype: str
    ) -> Any:
        """View of `buffer` from byte `offset`; `stride` is that of the first axis, in bytes."""
        kind = self._dtype(dtype)
        strides = None
        if stride is not None:
            inner = _contiguous(shape[1:], kind.itemsize)
            strides = (stride, *inner)
        return self._np.ndarray(tuple(shape), kind, buffer, offset, strides)

    def move(self, value: Any) -> Any:
        """Nothing to move."""
        return value


def _contiguous(shape: list[int], item_bytes: int) -> list[int]:
    strides, step = [], item_bytes
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return strides[::-1]


class TorchMaker:
    """Makes torch tensors, moved to `device` if one is given."""

    def __init__(self, device: Any) -> None:
        import torch

        self._torch = torch
        self._device = None if device is None else torch.device(device)
        if self._device is not None and self._device.type == "cuda":
            if not torch.cuda.is_available():
                raise _native.Unsupported(
                    f"device {device} is not supported: torch finds no CUDA device; "
                    'leave device out or choose "cpu"'
                )
        elif self._device is not None and self._device.type == "cpu":
            self._device = None

    def check(self, dtypes: set[str]) -> None:
        """Refuses dtypes that cannot be made, before anything is read."""
        for name in dtypes:
            if not hasattr(self._torch, name):
                raise _native.Unsupported(
                    f"dtype {name} is not supported: this torch does not have it"
                )

    def array(
        self, buffer: Any, offset: int, shape: list[int], stride: int | None, dtype: str
    ) -> Any:
        """View of `buffer` from byte `offset`; `stride` is that of the first axis, in bytes."""
        torch, kind = self._torch, getattr(self._torch, dtype)
        count = math.prod(shape)
        if count == 0:
            return torch.empty(tuple(shape), dtype=kind)
        if not buffer.writable:
            # Bytes that other samples may share: torch has no read-only tensors.
            buffer, offset = bytearray(memoryview(buffer)[offset:]), 0
        if stride is None:
            return torch.frombuffer(buffer, dtype=kind, count=count, offset=offset).view(shape)
        item = kind.itemsize
        inner = [s // item for s in _contiguous(shape[1:], item)]
        span = (shape[0] - 1) * (stride // item) + math.prod(shape[1:])
        flat = torch.frombuffer(buffer, dtype=kind, count=span, offset=offset)
        return flat.as_strided(tuple(shape), (stride // item, *inner))

    def move(self, value: Any) -> Any:
        """The tensor on the loader's device."""
        if self._device is None:
            return value
        return value.to(self._device, non_blocking=True)


Maker = NumpyMaker | TorchMaker


def make_batch(raw: tuple, maker: Maker) -> dict[str, Any]:
    """The dict that a loader hands out, from the native tuple."""
    _, _, keys, valid, _, parts, fields = raw
    batch: dict[str, Any] = {}
    for name, tag, payload in fields:
        _MAKERS[tag](batch, name, payload, parts, maker)
    batch["key"] = keys
    batch["_valid"] = maker.move(maker.array(valid, 0, [len(keys)], None, "bool"))
    return batch


def _view(payload: tuple, parts: list, maker: Maker) -> Any:
    part, offset, shape, stride, dtype = payload
    buffer = parts[part] if part < len(parts) else bytearray()
    return maker.move(maker.array(buffer, offset, shape, stride, dtype))


def _vector(buffer: Any, dtype: str, shape: list[int], maker: Maker) -> Any:
    return maker.move(maker.array(buffer, 0, shape, None, dtype))


def _dense(batch: dict, name: str, payload: Any, parts: list, maker: Maker) -> None:
    batch[name] = _view(payload, parts, maker)


def _list(batch: dict, name: str, payload: Any, parts: list, maker: Maker) -> None:
    batch[name] = [_view(item, parts, maker) for item in payload]


def _blobs(batch: dict, name: str, payload: Any, parts: list, maker: Maker) -> None:
    views = []
    for part, offset, shape, _, _ in payload:
        whole = memoryview(parts[part]) if shape[0] else memoryview(b"")
        views.append(whole[offset : offset + shape[0]].toreadonly())
    batch[name] = views


def _ragged(batch: dict, name: str, payload: Any, parts: list, maker: Maker) -> None:
    values, offsets = payload
    batch[name] = _view(values, parts, maker)
    batch[f"{name}_offsets"] = _vector(offsets, "int64", [len(offsets) // 8], maker)


def _padded(batch: dict, name: str, payload: Any, parts: list, maker: Maker) -> None:
    values, count = payload
    batch[name] = _view(values, parts, maker)
    batch[f"{name}_count"] = _vector(count, "int64", [len(count) // 8], maker)


def _plain(batch: dict, name: str, payload: Any, parts: list, maker: Maker) -> None:
    batch[name] = payload


def _objects(batch: dict, name: str, payload: Any, parts: list, maker: Maker) -> None:
    batch[name] = [wrap(value) for value in payload]


def _scalars(batch: dict, name: str, payload: Any, parts: list, maker: Maker) -> None:
    batch[name] = _vector(payload, "float64", [len(payload) // 8], maker)


def _poses(batch: dict, name: str, payload: Any, parts: list, maker: Maker) -> None:
    batch[name] = _vector(payload, "float64", [len(payload) // 128, 4, 4], maker)


def _boxes(batch: dict, name: str, payload: Any, parts: list, maker: Maker) -> None:
    geometry, velocity, lidar_points, offsets, names, tokens = payload
    count = len(geometry) // 28
    batch[name] = _vector(geometry, "float32", [count, 7], maker)
    batch[f"{name}_offsets"] = _vector(offsets, "int64", [len(offsets) // 8], maker)
    batch[f"{name}_velocity"] = _vector(velocity, "float32", [count, 3], maker)
    batch[f"{name}_lidar_points"] = _vector(lidar_points, "int32", [count], maker)
    batch[f"{name}_names"] = names
    batch[f"{name}_token"] = tokens


_MAKERS = {
    "dense": _dense,
    "list": _list,
    "blobs": _blobs,
    "ragged": _ragged,
    "padded": _padded,
    "text": _plain,
    "scalars": _scalars,
    "poses": _poses,
    "objects": _objects,
    "boxes": _boxes,
}
