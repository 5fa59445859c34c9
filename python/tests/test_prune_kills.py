"""`ckpt prune` killed with SIGKILL at its operations: steps are whole or gone, the newest stays."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import drivetrain as dt
import numpy as np

PROGRAM = pathlib.Path(sys.executable).with_name("drivetrain")
DEADLINE_S = 120
STEPS = (1, 2, 3)
#: Every operation when there is time, else every third, which meets each kind of them.
STRIDE = 1 if os.environ.get("DRIVETRAIN_LONG") else 3


def three_steps(root):
    with dt.Checkpointer(root, keep=None) as ckpt:
        for step in STEPS:
            state = {"w": np.full(500, float(step)), "n": step}
            ckpt.save(step, {"v": state}, blocking=True, rng=False)


def prune(root, fault="", log=""):
    own = {**os.environ, "DRIVETRAIN_FAULT": fault, "DRIVETRAIN_FAULT_LOG": str(log)}
    command = [str(PROGRAM), "ckpt", "prune", str(root), "--keep-last", "1"]
    return subprocess.run(command, env=own, capture_output=True, timeout=DEADLINE_S).returncode


def operations(folder):
    """How many operations a prune of these steps has."""
    three_steps(folder / "run")
    assert prune(folder / "run", log=folder / "log") == 0
    lines = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
    assert sum(line["stage"] == "before" and line["op"] == "delete" for line in lines) >= 6
    return max(line["n"] for line in lines)


def check(root, where):
    """Whatever a kill left: the newest restores, and what is listed is whole."""
    live = {"w": np.zeros(500), "n": 0}
    with dt.Checkpointer(root, keep=None) as ckpt:
        r = ckpt.restore({"v": live}, rng=False)
        assert (r.step, r.skipped) == (3, []), where
        assert (live["w"] == 3).all() and live["n"] == 3, where
        for step in ckpt.steps():
            assert ckpt.verify(step).ok, (where, step)
            ckpt.restore({"v": live}, step=step, rng=False)
            assert (live["w"] == step).all(), (where, step)


def test_a_prune_that_is_killed_leaves_whole_steps_and_the_newest(tmp_path):
    count = operations(tmp_path)
    assert count > 12, count
    for kind in ("kill", "kill-after"):
        first = 1 if kind == "kill" else 2
        for number in range(first, count + 1, STRIDE):
            root, where = tmp_path / f"{kind}-{number}", f"{kind}@{number} of {count}"
            three_steps(root)
            assert prune(root, fault=f"{kind}@{number}") == -signal.SIGKILL, where
            check(root, where)
            assert prune(root) == 0, where
            check(root, where)
            with dt.Checkpointer(root, keep=None) as ckpt:
                assert ckpt.steps() == [3], where
