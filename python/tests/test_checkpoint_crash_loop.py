"""Processes that die while they restore: counted, stepped over, and forgotten when it works."""

import signal
import subprocess
import sys

import drivetrain as dt
import numpy as np
import pytest
from drivetrain import _native

CHILD = """
import os, signal, sys
import drivetrain as dt, numpy as np

class Bomb:
    def state_dict(self):
        return {}
    def load_state_dict(self, state):
        os.kill(os.getpid(), signal.SIGKILL)

ckpt = dt.Checkpointer(sys.argv[1])
ckpt.restore({"w": np.zeros(4), "bomb": Bomb()}, step=2 if len(sys.argv) > 2 else None)
"""


class Calm:
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def crash(root, *more):
    child = subprocess.run([sys.executable, "-c", CHILD, str(root), *more], capture_output=True)
    assert child.returncode == -signal.SIGKILL, child.stderr


@pytest.fixture
def root(tmp_path):
    with dt.Checkpointer(tmp_path / "run") as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"w": np.full(4, float(step)), "bomb": Calm()}, blocking=True)
    return tmp_path / "run"


def restored(root, **options):
    live = {"w": np.zeros(4), "bomb": Calm()}
    with dt.Checkpointer(root) as ckpt:
        r = ckpt.restore(live, **options)
    assert (live["w"] == r.step).all()
    return r


def test_a_step_that_kills_its_readers_is_stepped_over(root):
    for _ in range(2):
        crash(root)
    assert restored(root).step == 2, "two crashes may be anything"
    assert not list(root.glob(".restoring/*")), "a restore that works forgets them"
    for _ in range(3):
        crash(root)
    r = restored(root)
    assert r.step == 1
    ((step, reason),) = r.skipped
    assert step == 2 and "killed" in reason and "step=2" in reason
    assert restored(root, step=2).step == 2, "a named step is tried all the same"
    assert restored(root).step == 2 and not list(root.glob(".restoring/*"))


def test_errors_are_no_crashes(root):
    with dt.Checkpointer(root) as ckpt:
        for _ in range(4):
            with pytest.raises(_native.InvalidArgument):
                ckpt.restore({"w": np.zeros(5)})
    assert restored(root).step == 2


def test_a_root_that_cannot_be_written_restores_all_the_same(root):
    (root / ".restoring").write_text("a file where a folder should be")
    assert restored(root).step == 2
