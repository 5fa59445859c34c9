"""Every kind of leaf and container keeps its bits, its type and its place."""

import collections
import math

import drivetrain as dt
import numpy as np
import pytest
import torch
from drivetrain import _native
from torch import nn

# more threads than cores only fight over them
torch.set_num_threads(1)

FLOAT8 = [
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
]
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    *FLOAT8,
]


def bits(tensor):
    """The bytes of a tensor, row-major."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def raw(dtype, shape):
    """A tensor whose elements are any bits of the dtype."""
    count = math.prod(shape) * dtype.itemsize
    data = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
    return data.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


@pytest.fixture
def ckpt(tmp_path):
    with dt.Checkpointer(tmp_path / "run") as made:
        yield made


def round_trip(ckpt, value, target=None):
    step = (ckpt.steps() or [0])[-1] + 1
    ckpt.save(step, {"v": value}, blocking=True)
    return ckpt.restore({"v": target}).state["v"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_keeps_its_bits(ckpt, dtype):
    torch.manual_seed(3)
    shapes = [(), (1,), (7,), (0,), (3, 0, 2), (2, 3, 5), (33, 129)]
    tensors = {f"{shape}": raw(dtype, shape) for shape in shapes}
    got = round_trip(ckpt, tensors)
    live = {key: torch.zeros_like(value) for key, value in tensors.items()}
    ckpt.restore({"v": dict(live)})
    for key, value in tensors.items():
        for found in (got[key], live[key]):
            assert found.dtype is dtype and found.shape == value.shape
            assert bits(found) == bits(value), key


def test_views_are_stored_row_major(ckpt):
    base = torch.arange(24.0).reshape(2, 3, 4)
    views = {
        "transposed": base.transpose(0, 2),
        "strided": base[:, ::2, 1::2],
        "expanded": torch.arange(3.0).expand(4, 3),
        "flipped": base.flip(0),
        "conjugated": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "parameter": nn.Parameter(base.clone()),
    }
    got = round_trip(ckpt, views)
    for key, value in views.items():
        assert torch.equal(got[key], value.detach().resolve_conj().resolve_neg()), key
    assert got["channels last"].stride() == views["channels last"].stride()
    assert not got["parameter"].requires_grad


def test_live_tensors_of_any_layout_and_dtype_are_filled_in_place(ckpt):
    want = torch.arange(24.0).reshape(2, 3, 4)
    live = {
        "plain": torch.zeros(2, 3, 4),
        "transposed": torch.zeros(4, 3, 2).transpose(0, 2),
        "double": torch.zeros(2, 3, 4, dtype=torch.float64),
        "part": torch.zeros(4, 3, 8)[::2, :, ::2],
        "leaf": torch.zeros(2, 3, 4, requires_grad=True),
    }
    before = dict(live)
    ckpt.save(1, {"v": dict.fromkeys(live, want)}, blocking=True)
    version = live["plain"]._version
    r = ckpt.restore({"v": live})
    for key, tensor in live.items():
        assert tensor is before[key] and torch.equal(tensor.double(), want.double()), key
        assert r.state["v"][key] is tensor
    assert live["leaf"].requires_grad and live["plain"]._version > version


NUMPY = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.arange(6).reshape(2, 3).T,
    np.array(3.5),
    np.zeros((0, 4), np.int16),
    np.array([True, False]),
    np.array([1 + 2j], np.complex128),
    np.arange(3, dtype=">i4"),
    np.array(["lidar", "\u00e4"]),
    np.array([b"raw", b""]),
    np.array(["2026-11-30T00:00"], "datetime64[us]"),
    np.array([(1, 2.5), (3, 4.5)], [("ring", "u1"), ("x", "<f4")]),
    np.arange(4, dtype=np.longdouble),
]


@pytest.mark.parametrize("array", NUMPY, ids=lambda a: a.dtype.str)
def test_numpy_arrays_keep_dtype_and_elements(ckpt, array):
    got = round_trip(ckpt, array)
    assert type(got) is np.ndarray and got.dtype == array.dtype and got.shape == array.shape
    assert np.array_equal(got, array)
    live = np.zeros_like(array)
    assert ckpt.restore({"v": live}).state["v"] is live
    assert np.array_equal(live, array)


def test_ml_dtypes_arrays(ckpt):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e3m4):
        array = np.array([0.5, -2.0, 1.0]).astype(dtype)
        got = round_trip(ckpt, {"a": array, "s": array[1]})
        assert got["a"].dtype == array.dtype and got["a"].tobytes() == array.tobytes()
        assert got["s"] == array[1] and got["s"].dtype == array.dtype


def test_numpy_and_torch_fill_each_other(ckpt):
    want = torch.arange(4, dtype=torch.float32)
    live = np.zeros(4, np.float64)
    round_trip(ckpt, want, live)
    assert live.tolist() == want.tolist()
    tensor = torch.zeros(4)
    round_trip(ckpt, np.arange(4), tensor)
    assert torch.equal(tensor, want)
    frozen = np.zeros(4)
    frozen.flags.writeable = False
    assert round_trip(ckpt, np.arange(4.0), frozen).tolist() == [0, 1, 2, 3]


def test_containers_keep_their_types(ckpt):
    value = {
        "od": collections.OrderedDict(b=torch.ones(2), a=1),
        "dd": collections.defaultdict(list, {3: [torch.zeros(1)]}),
        "count": collections.Counter({"a": 2}),
        "tuple": (1, [torch.tensor(2)], {}),
        "size": torch.Size([1, 2]),
        "dtype": torch.float16,
        "device": torch.device("cpu"),
        "scalar": np.float32(1.5),
        5: {"~odd": math.inf, "0": 0, 0: "0"},
    }
    got = round_trip(ckpt, value)
    assert list(map(type, got.values())) == list(map(type, value.values()))
    assert list(got) == list(value) and got[5] == value[5] and list(got["od"]) == ["b", "a"]
    assert torch.equal(got["dd"][3][0], torch.zeros(1)) and got["dd"].default_factory is list
    assert got["tuple"][0] == 1 and got["tuple"][1][0] == 2


REFUSED = {
    "function": lambda: lambda: 0,
    "set": lambda: {1},
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.empty(3, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "objects": lambda: np.array([object()]),
    "masked": lambda: np.ma.masked_array([1, 2], [True, False]),
    "lazy": lambda: nn.LazyLinear(3).weight,
    "class": lambda: nn.Linear,
}


@pytest.mark.parametrize("kind", REFUSED)
def test_unsupported_leaves_are_refused_with_their_path(ckpt, kind):
    with pytest.raises(_native.Unsupported, match=r"extra\.deep\.1"):
        ckpt.save(1, {"extra": {"deep": [0, REFUSED[kind]()]}}, blocking=True)
    assert ckpt.steps() == []


def test_replicas_are_the_ranks_along_replicated_dimensions():
    placement = pytest.importorskip("torch.distributed.tensor")
    from drivetrain._checkpoint.pieces import replica_ranks

    copy, shard = placement.Replicate(), placement.Shard(0)
    mesh = torch.arange(12).reshape(2, 3, 2)
    assert replica_ranks(mesh, (1, 2, 0), (shard, shard, shard)) == (10,)
    assert replica_ranks(mesh, (1, 2, 0), (copy, shard, shard)) == (4, 10)
    assert replica_ranks(mesh, (1, 2, 0), (shard, copy, copy)) == (6, 7, 8, 9, 10, 11)
    assert replica_ranks(mesh, (0, 0, 0), (copy, copy, copy)) == tuple(range(12))
