"""Preemption: one signal to one rank, and all stop at one step with a committed checkpoint."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import drivetrain as dt
import numpy as np
import pytest

WORKER = pathlib.Path(__file__).with_name("preempt_worker.py")
DEADLINE_S = 120


def start(scenario, world, folder, **environment):
    children = [
        subprocess.Popen(
            [sys.executable, str(WORKER), scenario, str(rank), str(world), str(folder)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        for rank in range(world)
    ]
    for child in children:
        assert child.stdout.readline() == "READY\n"
    return children


def finish(children):
    try:
        return [child.wait(DEADLINE_S) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
            child.stdout.close()


@pytest.mark.parametrize("target", [0, 1])
def test_a_signal_to_one_rank_stops_both_at_one_step(tmp_path, target):
    children = start("loop", 2, tmp_path)
    time.sleep(0.3)
    children[target].send_signal(signal.SIGTERM)
    assert finish(children) == [0, 0]
    answers = [json.loads((tmp_path / f"loop-{rank}.json").read_text()) for rank in range(2)]
    assert answers[0]["step"] == answers[1]["step"]
    assert [a["received"] for a in answers] == [
        signal.SIGTERM if rank == target else None for rank in range(2)
    ]
    # the handler that was there before is called as well
    assert answers[target]["chained"] == [signal.SIGTERM]
    assert answers[1 - target]["chained"] == []
    step = answers[0]["step"]
    weight = np.zeros(1000)
    with dt.Checkpointer(tmp_path / "run", rank=0, world_size=1) as ckpt:
        assert ckpt.restore({"w": weight}).step == step
    assert (weight == step + 1).all()
    left = [path.name for path in (tmp_path / "run").rglob("*notes*")]
    assert left == []


def test_what_was_staged_is_flushed_though_the_loop_never_looks(tmp_path):
    # the write is still under way when the grace is over
    children = start("deaf", 1, tmp_path, DRIVETRAIN_FAULT="delay=1500ms@finish")
    children[0].send_signal(signal.SIGTERM)
    assert finish(children) == [128 + signal.SIGTERM]
    weight = np.zeros(1000, dtype=np.int64)
    with dt.Checkpointer(tmp_path / "run") as ckpt:
        assert ckpt.restore({"w": weight}).step == 7
    assert (weight == np.arange(1000)).all()


def test_handlers_are_put_back(tmp_path):
    def mine(number, frame):
        pass

    before = signal.signal(signal.SIGUSR1, mine)
    try:
        with dt.Checkpointer(tmp_path) as ckpt:
            assert ckpt.should_stop is False
            preemption = ckpt.preemption(signals=["SIGUSR1"])
            assert signal.getsignal(signal.SIGUSR1) is not mine
            with pytest.raises(ValueError, match="second"):
                ckpt.preemption()
            assert ckpt.should_stop is False and preemption.received is None
            os.kill(os.getpid(), signal.SIGUSR1)
            limit = time.monotonic() + DEADLINE_S
            while not ckpt.should_stop and time.monotonic() < limit:
                time.sleep(0.01)
            assert ckpt.should_stop and preemption.received == signal.SIGUSR1
        assert signal.getsignal(signal.SIGUSR1) is mine
        assert signal.set_wakeup_fd(-1) == -1
        with (
            dt.Checkpointer(tmp_path) as ckpt,
            pytest.raises(ValueError, match="signals"),
        ):
            ckpt.preemption(signals=["SIGNOTHING"])
    finally:
        signal.signal(signal.SIGUSR1, before)
