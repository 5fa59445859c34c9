"""Ranks of one machine read what they share from the disk once."""

import json
import subprocess
import sys

import drivetrain as dt
import numpy as np
import pytest

CHILD = """
import json, sys
import drivetrain as dt, numpy as np

root, rank, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]

def disk_bytes():
    with open("/proc/self/io") as file:
        return dict(line.split(": ") for line in file.read().splitlines())["read_bytes"]

live = np.zeros((8, 1 << 20), np.float32)
target = live
if kind == "halves":
    live = live[:4]
    target = dt.Sharded(live, (8, 1 << 20), (4 * rank, 0))
ckpt = dt.Checkpointer(root, rank=rank, world_size=2, timeout="60s")
before = int(disk_bytes())
ckpt.restore({"w": target}, rng=False)
first = 4 * rank if kind == "halves" else 0
right = all((row == first + i).all() for i, row in enumerate(live))
print(json.dumps({"read": int(disk_bytes()) - before, "right": bool(right)}))
"""
STORED_BYTES = 32 << 20


@pytest.mark.parametrize("kind", ["whole", "halves"])
def test_two_ranks_read_a_shared_tensor_once(tmp_path, kind):
    """The kernel counts what each process had read from the device."""
    rows = np.repeat(np.arange(8, dtype=np.float32)[:, None], 1 << 20, 1)
    with dt.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, {"w": rows}, blocking=True)
    start = [sys.executable, "-c", CHILD, str(tmp_path / "run")]
    children = [
        subprocess.Popen([*start, str(rank), kind], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    answers = [json.loads(child.communicate(timeout=120)[0]) for child in children]
    assert all(answer["right"] for answer in answers)
    read = sum(answer["read"] for answer in answers)
    if read == 0:
        pytest.skip("this file system keeps its files in memory")
    assert STORED_BYTES <= read < 1.5 * STORED_BYTES, answers
