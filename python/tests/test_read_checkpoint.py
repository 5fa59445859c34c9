"""The documented layout is enough to read a checkpoint: the example that does, on real ones."""

import collections
import importlib.util
import math
import pathlib
import threading

import drivetrain as dt
import numpy as np
import pytest

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "read_checkpoint.py"


@pytest.fixture(scope="module")
def reader():
    spec = importlib.util.spec_from_file_location("read_checkpoint", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def whole():
    rng = np.random.default_rng(4)
    return {
        "rows": rng.random((7, 3), np.float32),
        "columns": rng.integers(-9, 9, (4, 6, 5), np.int16),
        "flat": rng.random((3, 4, 5)),
        "complex": rng.random((2, 3)) + 1j,
        "scalar": np.array(2.5, np.float32),
        "none": np.zeros((0, 4), np.int64),
        "line": np.arange(11, dtype=np.uint8),
    }


def on_two_ranks(folder, make):
    """Saves `make(rank)` as two ranks that meet through files."""

    def save(rank):
        with dt.Checkpointer(folder, rank=rank, world_size=2, timeout="60s") as ckpt:
            ckpt.save(3, make(rank), blocking=True)

    threads = [threading.Thread(target=save, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return folder / "step-00000003"


def parts(whole, rank):
    cut = slice(0, 4) if rank == 0 else slice(4, None)
    odd = slice(0, 2) if rank == 0 else slice(2, None)
    flat = whole["flat"].ravel()[: 17 if rank == 0 else None][0 if rank == 0 else 17 :]
    line = whole["line"][: 5 if rank == 0 else None][0 if rank == 0 else 5 :]
    return {
        "rows": dt.Sharded(whole["rows"][cut].copy(), (7, 3), (cut.start, 0)),
        "columns": dt.Sharded(whole["columns"][:, odd].copy(), (4, 6, 5), (0, odd.start, 0)),
        "flat": dt.Sharded.flat(flat.copy(), (3, 4, 5), 0 if rank == 0 else 17),
        "complex": whole["complex"],
        "scalar": whole["scalar"],
        "none": whole["none"],
        "line": dt.Sharded.flat(line.copy(), (11,), 0 if rank == 0 else 5),
    }


PLAIN = {
    "epoch": 3,
    "big": 2**80,
    "nan": math.nan,
    5: "int key",
    "~tilde": b"\x00\xff",
    "nested": {"empty": {}, "tuple": (1, [2, ()])},
    "ordered": collections.OrderedDict(b=1, a=None),
    "key.with/odd \u00e4": True,
}


def test_the_example_reads_what_two_ranks_wrote(tmp_path, reader, whole):
    step = on_two_ranks(
        tmp_path,
        lambda rank: {"t": parts(whole, rank), "plain": PLAIN, "own": dt.PerRank([rank, "x"])},
    )
    for rank in range(2):
        state = reader.Reader(step, rank).state()
        for name, want in whole.items():
            got = state["t"][name]
            assert got.shape == want.shape and got.data == want.tobytes(), name
        assert state["own"] == [rank, "x"]
        plain = state["plain"]
        assert math.isnan(plain.pop("nan"))
        assert plain == {key: value for key, value in PLAIN.items() if key != "nan"}
    assert {chunk["flat_len"] for chunk in reader.Reader(step).chunks['["t","flat"]']} == {17, 43}


def test_the_example_finds_damage(tmp_path, reader, whole):
    step = on_two_ranks(tmp_path, lambda rank: {"t": parts(whole, rank)})
    (file,) = step.glob("*/rank-00001.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match="crc32c"):
        reader.Reader(step).state()


def test_tied_and_odd_dtypes(tmp_path, reader):
    torch = pytest.importorskip("torch")
    weight = torch.arange(6.0).reshape(2, 3)
    state = {"a": weight, "b": weight, "h": weight.bfloat16(), "c": weight.to(torch.complex32)}
    with dt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(3, {"v": state}, blocking=True)
    got = reader.Reader(tmp_path / "step-00000003").state()["v"]
    assert got["a"].data == got["b"].data == weight.numpy().tobytes()
    assert got["h"].dtype == "BF16" and got["c"].dtype == "complex32"
    assert got["h"].data == weight.bfloat16().view(torch.uint8).numpy().tobytes()
    assert got["c"].data == state["c"].view(torch.uint8).numpy().tobytes()
