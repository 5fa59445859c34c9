"""Processes that die while they restore: counted, stepped over, and forgotten when it works."""

import json
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


RANK = """
import json, os, signal, sys
import drivetrain as dt, numpy as np

root, rank, victim = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

class Bomb:
    def state_dict(self):
        return {}
    def load_state_dict(self, state):
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

ckpt = dt.Checkpointer(root, rank=rank, world_size=2, timeout="6s")
try:
    r = ckpt.restore({"w": np.zeros(4), "bomb": Bomb()}, rng=False)
    print(json.dumps([r.step, r.skipped]))
except (dt.DeadlineExceeded, dt.PeerFailed) as error:
    print(json.dumps(str(error)))
"""


def two_ranks(root, victim):
    """Both ranks restore, and one of them dies while it loads; what the living ones say."""
    command = [sys.executable, "-c", RANK, str(root)]
    started = [
        subprocess.Popen([*command, str(rank), str(victim)], stdout=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    try:
        said = [process.communicate(timeout=100)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    codes = [process.returncode for process in started]
    assert codes == [-signal.SIGKILL if rank == victim else 0 for rank in (0, 1)], (codes, said)
    return [json.loads(text) for text in said if text]


def test_a_rank_that_is_killed_while_it_restores_counts_for_all(root):
    """Whoever of two ranks dies: that is one crash, and after three both go to the older step."""
    for victim in (1, 0, 1):
        (text,) = two_ranks(root, victim)
        assert f"rank {victim}" in text, text
    first, second = two_ranks(root, -1)
    assert first == second and first[0] == 1
    ((step, reason),) = first[1]
    assert step == 2 and "3 processes were killed" in reason, reason
