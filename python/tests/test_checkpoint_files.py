"""Checkpoint files as other programs see them, and ranks that meet through torch's Store."""

import json
import subprocess
import sys
import threading
from datetime import timedelta

import numpy as np
import pyarrow as pa
import pytest
from drivetrain import _native as native

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors")

NAMES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def row(path, tensor, replicas=None):
    shape = list(tensor.shape)
    base = (
        json.dumps(path, separators=(",", ":")),
        NAMES[tensor.dtype],
        shape,
        [0] * len(shape),
        shape,
        tensor.data_ptr(),
        tensor.nbytes,
    )
    return base if replicas is None else (*base, replicas, None)


def tensors():
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(1000, 300, generator=generator)
    found = {str(dtype): base[: 7 + i].to(dtype) for i, dtype in enumerate(NAMES)}
    found |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "big": base.repeat(3, 1)}
    return found


def raw(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_the_safetensors_library_and_pyarrow_read_what_was_written(tmp_path):
    saved = tensors()
    ckpt = native.Checkpointer(str(tmp_path), 0, 1)
    rows = [row([name, 0], t, []) for name, t in saved.items()]
    handle = ckpt.save(3, rows, '{"a":1}', "null", blocking=True, overwrite=False)
    assert handle.wait() == 3 and handle.done() and handle.staged_seconds > 0
    step = ckpt.open(3)
    folder = tmp_path / "step-00000003"
    with safetensors.safe_open(
        folder / step.attempt / "rank-00000.safetensors", framework="pt"
    ) as file:
        names = [k for k in file.keys() if not k.startswith("__pad.")]
        assert sorted(names) == sorted(f"{name}.0" for name in saved)
        for name, tensor in saved.items():
            got = file.get_tensor(f"{name}.0")
            assert got.dtype == tensor.dtype and got.shape == tensor.shape
            assert raw(got) == raw(tensor), name
    with pa.OSFile(str(folder / step.attempt / "tensors.arrow")) as file:
        table = pa.ipc.open_file(file).read_all()
    assert table.column_names[:6] == ["path", "entry", "dtype", "shape", "offsets", "extent"]
    for line in table.to_pylist():
        tensor = saved[json.loads(line["path"])[0]]
        content = (folder / line["file"]).read_bytes()
        assert content[line["start"] :][: line["length"]] == raw(tensor)
        assert line["shape"] == list(tensor.shape) and line["codec"] == "raw"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert list(manifest)[-1] == "crc32c" and manifest["state"] == {"a": 1}
    ckpt.close()


def test_memory_is_filled_in_place_and_other_shapes_are_refused(tmp_path):
    saved = tensors()
    ckpt = native.Checkpointer(str(tmp_path), 0, 1)
    rows = [row([name], t, []) for name, t in saved.items()]
    ckpt.save(1, rows, "{}", "null", blocking=True, overwrite=False)
    targets = {name: torch.zeros_like(t) for name, t in saved.items()}
    ckpt.open(1).read_into([row([name], t) for name, t in targets.items()])
    assert all(raw(targets[name]) == raw(t) for name, t in saved.items())
    with pytest.raises(native.InvalidArgument, match="big"):
        ckpt.open(1).read_into([row(["big"], torch.zeros(3, 3))])
    with pytest.raises(native.NotFound, match="nobody"):
        ckpt.open(1).read_into([row(["nobody"], torch.zeros(3, 3))])
    with pytest.raises(native.AlreadyExists, match="overwrite"):
        ckpt.save(1, rows, "{}", "null", blocking=True, overwrite=False)


def test_ranks_meet_through_torchs_store(tmp_path):
    server = torch.distributed.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
    )
    weights = torch.arange(6 << 20, dtype=torch.float32)
    failed = []

    def rank(r, world):
        try:
            store = server.clone()
            ckpt = native.Checkpointer(str(tmp_path), r, world, timeout_s=60.0, store=store)
            both = list(range(world))
            for step in (1, 2):
                # Larger than one value of the store may be.
                own = json.dumps({"rank": r, "pad": "x" * (9 << 20)})
                rows = [row(["w"], weights, both)]
                ckpt.save(step, rows, "{}", own, blocking=True, overwrite=False)
            assert ckpt.agree("done", str(r)) == [str(i) for i in both]
            step = ckpt.open(2)
            assert json.loads(step.per_rank_json(r))["rank"] == r
            got = torch.zeros_like(weights)
            step.read_into([row(["w"], got)])
            assert torch.equal(got, weights)
            ckpt.close()
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=rank, args=(r, 2)) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    sizes = [f.stat().st_size for f in tmp_path.glob("step-00000002/*/rank-*.safetensors")]
    assert len(sizes) == 2 and sum(sizes) < weights.nbytes + (1 << 16)
    assert np.ptp(sizes) < 1 << 20, "the two ranks share the work"


class VanishingStore:
    """A torch Store in which a key that was looked for is deleted by another rank at once.

    `get` and `wait` of a key that is not there block for the store's own timeout, half an hour for
    a process group's; here they fail, since nothing may call them.
    """

    def __init__(self, store):
        self.store = store
        self.seen = set()

    def check(self, keys):
        found = self.store.check(keys)
        for key in keys:
            if found and key not in self.seen:
                self.seen.add(key)
                self.store.delete_key(key)
        return found

    def get(self, key):
        if not self.store.check([key]):
            raise AssertionError(f"a wait of the store's own for {key}")
        return self.store.get(key)

    def set(self, key, value):
        self.store.set(key, value)

    def compare_set(self, key, expected, desired):
        return self.store.compare_set(key, expected, desired)

    def delete_key(self, key):
        return self.store.delete_key(key)


def test_a_key_that_another_rank_deletes_is_not_waited_for(tmp_path):
    server = torch.distributed.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5)
    )
    found = [None, None]

    def rank(r):
        store = VanishingStore(server.clone())
        ckpt = native.Checkpointer(str(tmp_path), r, 2, timeout_s=30.0, store=store)
        found[r] = ckpt.agree("done", f"payload of {r}")
        ckpt.close()

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [["payload of 0", "payload of 1"]] * 2


@pytest.mark.parametrize("kind", ["HashStore", "FileStore", "TCPStore"])
def test_every_store_of_torch_says_not_there_at_once(kind, tmp_path):
    made = {
        "HashStore": lambda: torch.distributed.HashStore(),
        "FileStore": lambda: torch.distributed.FileStore(str(tmp_path / "store"), 2),
        "TCPStore": lambda: torch.distributed.TCPStore("127.0.0.1", 0, 1, True),
    }[kind]()
    root = tmp_path / "root"
    ckpt = native.Checkpointer(str(root), 1, 2, timeout_s=0.2, store=made)
    with pytest.raises(TimeoutError, match="rank 0"):
        ckpt.agree("done", "")


def test_a_missing_rank_is_named(tmp_path):
    ckpt = native.Checkpointer(str(tmp_path), 0, 2, timeout_s=0.3)
    with pytest.raises(native.DeadlineExceeded, match="rank 1"):
        ckpt.save(1, [row(["w"], torch.zeros(3), [])], "{}", "null", blocking=True, overwrite=False)
    with pytest.raises(TimeoutError, match="rank 1"):
        ckpt.agree("restore", "")
    assert ckpt.steps() == []


def test_the_default_writer_goes_through_io_uring_around_the_page_cache(tmp_path):
    import drivetrain as dt

    program = [sys.executable, "-m", "drivetrain._cli", "doctor", "--json"]
    report = subprocess.run(program, capture_output=True, text=True, check=False).stdout
    findings = {f["name"]: f for f in json.loads(report)["findings"]}
    if not findings["io_uring"]["good"]:
        pytest.skip(f"no io_uring here: {findings['io_uring']}")
    state = {"w": torch.arange(3 << 20, dtype=torch.float32)}
    with dt.Checkpointer(str(tmp_path / "ck")) as ckpt:
        ckpt.save(1, state, rng=False).wait()
        io = ckpt.stats()["io"]
    assert io["thread_writes"] == 0 and io["uring_writes"] > 0
    assert io["written_bytes"] >= 12 << 20
    # The one file of 12 MiB goes out in slices of at most 8 MiB; the small files need no O_DIRECT.
    assert io["direct_writes"] >= 2
