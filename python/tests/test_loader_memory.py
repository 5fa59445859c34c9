"""DataLoader's memory is a setting: measured in fresh processes, without torch's own noise."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
from data_factory import blobs, nuscenes, sparse_webdataset, webdataset

MIB = 1 << 20

MEASURE = """
    import os, sys
    import drivetrain as dt

    def rss():
        return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def status(name):
        for line in open("/proc/self/status"):
            if line.startswith(name):
                return int(line.split()[1]) * 1024
"""


def measure(script, tmp_path, **values):
    """Runs a script and returns the JSON it prints."""
    code = textwrap.dedent(MEASURE) + "\n" + textwrap.dedent(script)
    environment = {**os.environ, **{name: str(value) for name, value in values.items()}}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_mixed_sizes_stay_under_the_limit(tmp_path):
    # 1 KiB to 64 MiB in powers of two, 128 MiB per round: ten times the limit. The limit has room
    # for the largest batch that the loop still holds and the largest one after it.
    sizes = [1024 << (i * 5 % 17) for i in range(17)] * 12
    path = sparse_webdataset(tmp_path / "big.tar", sizes)
    limit = 150 * MIB
    script = """
        ds = dt.open(os.environ["DATA"], index=os.environ["INDEX"])
        loader = dt.DataLoader(
            ds, 1, shuffle=True, memory_limit=int(os.environ["LIMIT"]), output="numpy"
        )
        base, sizes = rss(), {}
        for batch in loader:
            for key, value in zip(batch["key"], batch["bin"]):
                sizes[key] = len(value)
        import json
        stats = loader.stats()
        print(json.dumps({
            "base": base, "peak": status("VmHWM"), "sizes": sorted(sizes.values()),
            "copied": stats["copied_batches"], "private": stats["private_bytes"],
        }))
    """
    got = measure(script, tmp_path, DATA=path, INDEX=tmp_path / "big.index.arrow", LIMIT=limit)
    assert got["sizes"] == sorted(sizes)
    assert sum(sizes) >= 10 * limit
    assert got["peak"] - got["base"] < limit + 64 * MIB, got


def test_a_thousand_epochs_leave_rss_flat(tmp_path):
    path = webdataset(tmp_path / "a.tar", blobs(12, 3000))
    script = """
        ds = dt.open(os.environ["DATA"], index=os.environ["INDEX"])
        loader = dt.DataLoader(ds, 5, shuffle=True, output="numpy", threads=2)
        marks = []
        for epoch in range(1000):
            for batch in loader:
                pass
            if epoch in (199, 999):
                marks.append(rss())
        import json
        print(json.dumps({"marks": marks, "epoch": loader.state_dict()["epoch"]}))
    """
    got = measure(script, tmp_path, DATA=path, INDEX=tmp_path / "a.index.arrow")
    assert got["epoch"] == 1000
    assert got["marks"][1] - got["marks"][0] < 4 * MIB, got


def test_loaders_come_and_go(tmp_path):
    root = nuscenes(tmp_path / "data")
    script = """
        ds = dt.open(os.environ["DATA"], index=os.environ["INDEX"])
        marks = []
        for turn in range(60):
            loader = dt.DataLoader(ds, 2, output="numpy", threads=2)
            steps = iter(loader)
            next(steps)
            if turn % 2:
                loader.close()
            if turn in (19, 59):
                marks.append((rss(), len(os.listdir("/proc/self/task"))))
            del loader, steps
        import json
        print(json.dumps(marks))
    """
    first, last = measure(script, tmp_path, DATA=root, INDEX=tmp_path / "a.index.arrow")
    assert last[1] <= first[1]
    assert last[0] - first[0] < 16 * MIB


def test_numpy_without_torch(tmp_path):
    root = nuscenes(tmp_path / "data")
    script = """
        import json
        sys.modules["torch"] = None
        import importlib.util
        found = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *a: None if name == "torch" else found(name, *a)
        ds = dt.open(os.environ["DATA"], index=os.environ["INDEX"])
        fields = {"CAM_BACK": dt.Image(size=(8, 16)), "LIDAR_TOP": None, "boxes": None}
        batch = next(iter(dt.DataLoader(ds, 2, fields=fields)))
        kinds = {name: type(value).__name__ for name, value in batch.items()}
        print(json.dumps({"kinds": kinds, "shape": batch["CAM_BACK"].shape}))
    """
    got = measure(script, tmp_path, DATA=root, INDEX=tmp_path / "a.index.arrow")
    assert got["shape"] == [2, 3, 8, 16]
    assert got["kinds"]["CAM_BACK"] == got["kinds"]["boxes_offsets"] == "ndarray"
    assert got["kinds"]["key"] == "list"


@pytest.mark.parametrize("available", [True, False])
def test_numpy_bfloat16_needs_ml_dtypes(tmp_path, available):
    root = nuscenes(tmp_path / "data")
    if available:
        pytest.importorskip("ml_dtypes")
    script = """
        import json
        if os.environ["AVAILABLE"] == "False":
            sys.modules["ml_dtypes"] = None
        ds = dt.open(os.environ["DATA"], index=os.environ["INDEX"])
        fields = {"CAM_BACK": dt.Image(size=(8, 16), dtype="bfloat16")}
        try:
            batch = next(iter(dt.DataLoader(ds, 2, fields=fields, output="numpy")))
            print(json.dumps(str(batch["CAM_BACK"].dtype)))
        except dt._native.Unsupported as error:
            print(json.dumps("refused" if "ml_dtypes" in str(error) else str(error)))
    """
    index = tmp_path / "a.index.arrow"
    got = measure(script, tmp_path, DATA=root, INDEX=index, AVAILABLE=available)
    assert got == ("bfloat16" if available else "refused")
