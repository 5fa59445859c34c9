"""Memory registered with io_uring: used by default where the locked-memory limit allows it, and a
refusal changes nothing but speed."""

import json
import subprocess
import sys
import zlib

import pytest
from data_factory import blobs, webdataset

#: Loads a tar and saves and restores a state, in a process whose rights `argv` says; prints what
#: was registered. Arrays are numpy's, so that no second is lost importing torch.
PROGRAM = """
import ctypes, json, resource, sys, zlib

tar, root, limited = sys.argv[1], sys.argv[2], sys.argv[3] == "limited"
if limited:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
    rights = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, rights) == 0
    for word in (0, 1):  # effective, permitted; 14 is CAP_IPC_LOCK, which lifts the limit
        rights[word] &= ~(1 << 14)
    assert libc.capset(header, rights) == 0, ctypes.get_errno()

import drivetrain as dt
import numpy as np

loader = dt.DataLoader(dt.open(tar, index=root + "/a.index.arrow"), 4, output="numpy")
texts = {key: bytes(value) for batch in loader for key, value in zip(batch["key"], batch["bin"])}
w = np.arange(3 << 20, dtype=np.float32)
with dt.Checkpointer(root + "/ck") as ckpt:
    ckpt.save(1, {"w": w}, rng=False).wait()
    saved = ckpt.stats()["io"]
    back = {"w": np.zeros_like(w)}
    ckpt.restore(back)
    verified = ckpt.verify(1).ok
print(json.dumps({
    "texts": {key: zlib.crc32(text) for key, text in texts.items()},
    "same": bool((back["w"] == w).all()) and verified,
    "load": loader.stats()["io"],
    "save": saved,
}))
"""


@pytest.fixture(scope="module")
def tar(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tar")
    return webdataset(folder / "a.tar", blobs(23))


def run(tar, folder, rights):
    program = [sys.executable, "-c", PROGRAM, str(tar), str(folder), rights]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    # Silently off: nothing on the terminal of someone who can change nothing.
    assert "regist" not in done.stderr, done.stderr
    return json.loads(done.stdout)


def expected():
    return {f"s{i:05d}": zlib.crc32(sample["bin"]) for i, sample in enumerate(blobs(23))}


def doctor():
    program = [sys.executable, "-m", "drivetrain._cli", "doctor", "--json"]
    report = subprocess.run(program, capture_output=True, text=True, check=False).stdout
    return {f["name"]: f for f in json.loads(report)["findings"]}


def test_without_locked_memory_everything_works_and_says_why(tar, tmp_path):
    said = run(tar, tmp_path, "limited")
    assert said["same"] and said["texts"] == expected()
    if not doctor()["io_uring"]["good"]:
        pytest.skip(f"no io_uring here: {doctor()['io_uring']}")
    for io in (said["load"], said["save"]):
        assert io["fixed_reads"] == io["fixed_writes"] == io["registered_bytes"] == 0
        assert "locked-memory" in io["unregistered_reason"], io
    assert said["load"]["uring_reads"] > 0 and said["save"]["uring_writes"] > 0


def test_where_the_limit_allows_it_loader_and_writer_use_registered_memory(tar, tmp_path):
    found = doctor()["locked memory"]
    if "registered" not in found["found"]:
        pytest.skip(f"memory cannot be registered here: {found}")
    said = run(tar, tmp_path, "free")
    assert said["same"] and said["texts"] == expected()
    load, save = said["load"], said["save"]
    assert load["unregistered_reason"] is None and load["registered_bytes"] > 0
    assert load["fixed_reads"] > 0 and load["thread_reads"] == 0
    # 12 MiB in slices of at most 8 MiB, all from the slot; the small files come from elsewhere.
    assert save["fixed_writes"] >= 2 and save["direct_writes"] >= save["fixed_writes"]
