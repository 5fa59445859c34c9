"""Several ranks, as real processes: one commit, one restored step, and errors that name a rank."""

import pathlib
import random
import signal
import subprocess
import sys
import time

import drivetrain as dt
import pytest
from drivetrain import _native
from ranks import read_answers, run_ranks

WORKER = pathlib.Path(__file__).with_name("rank_worker.py")
DEADLINE_S = 180


def launch(scenario, world, folder, only=None):
    """Runs a scenario on ranks and returns their answers, in rank order."""
    ranks = range(world) if only is None else only
    run_ranks(WORKER, scenario, world, folder, ranks, DEADLINE_S)
    return read_answers(folder / f"{scenario}-{world}-{rank}.json" for rank in ranks)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("ranks")
    return folder, launch("torch_two_ranks", 2, folder)


def test_ranks_are_those_of_the_process_group(two_ranks):
    assert [answer["ranks"] for answer in two_ranks[1]] == [[0, 2], [1, 2]]


def test_two_ranks_save_and_continue_bit_for_bit(two_ranks):
    for rank, answer in enumerate(two_ranks[1]):
        found = answer["save_and_restore"]
        assert found["step"] == 1 and found["own"] == {"rank": rank, "noise": [rank] * 3}
        for key in ("continues", "rank 0's buffers", "rng", "sharded", "dtensor", "mapped"):
            assert found[key], (rank, key)
    means = {answer["save_and_restore"]["mean after restore"] for answer in two_ranks[1]}
    assert len(means) == 1, "both ranks get rank 0's buffers"


def test_state_that_differs_is_refused_naming_key_and_ranks(two_ranks):
    for answer in two_ranks[1]:
        found = answer["differing_state"]
        assert "extra" in found["text"] and "deep" in found["text"] and "1" in found["text"]
        assert found["steps"] == [1]
    assert len({answer["differing_state"]["text"] for answer in two_ranks[1]}) == 1


def test_a_rank_that_cannot_save_stops_the_others_at_once(two_ranks):
    healthy, sick = (answer["one_rank_refuses"] for answer in two_ranks[1])
    assert sick["kind"] == "Unsupported" and "extra.bad" in sick["text"]
    assert healthy["kind"] == "PeerFailed" and "rank 1" in healthy["text"]
    assert "extra.bad" in healthy["text"] and healthy["soon"]


def test_damage_seen_by_one_rank_moves_all_to_the_same_older_step(two_ranks):
    for answer in two_ranks[1]:
        found = answer["damage_on_one_rank"]
        assert found["step"] == 11 and found["right"], found
        ((step, reason),) = found["skipped"]
        assert step == 12 and "rank-00001.safetensors" in reason
        assert "step 12" in found["named"] and "rank-00001.safetensors" in found["named"]


def test_what_two_ranks_saved_loads_on_one_and_on_three(two_ranks):
    folder = two_ranks[0]
    for world in (1, 3):
        for rank, answer in enumerate(launch("restore_numpy", world, folder)):
            assert answer["step"] == 1 and answer["right"] and answer["extra"] == {"n": 3}
            source = rank if rank < 2 else 0
            assert answer["own"] == {"rank": source, "noise": [source] * 3}
            assert answer["mapped"] == ({} if rank < 2 else {str(rank): 0})


def test_torch_loads_what_dtensors_saved_as_plain_tensors(two_ranks):
    torch = pytest.importorskip("torch")
    live = {"shard": torch.zeros(5, 2), "columns": None}
    with dt.Checkpointer(two_ranks[0] / "run", keep=None) as ckpt:
        r = ckpt.restore({"dtensor": live}, step=1, rng=False)
        assert ckpt.verify(1).ok
    want = torch.arange(10.0).reshape(5, 2)
    assert torch.equal(live["shard"], want) and torch.equal(live["columns"], want)
    assert torch.equal(r.state["dtensor"]["short"], want[:1])
    assert torch.equal(r.state["dtensor"]["copy"], want)


def test_fully_sharded_training_continues_and_loads_unsharded(two_ranks):
    torch = pytest.importorskip("torch")
    folder, answers = two_ranks
    assert all(answer["fully_sharded"]["continues"] for answer in answers)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    with dt.Checkpointer(folder / "fsdp") as ckpt:
        ckpt.restore({"model": model, "optimizer": optimizer}, rng=False)
    for name, parameter in model.named_parameters():
        assert parameter.tolist() == answers[0]["fully_sharded"]["whole"][name]
        assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape


def test_a_missing_rank_is_named_within_the_deadline(tmp_path):
    (answer,) = launch("missing_rank", 2, tmp_path, only=[0])
    assert answer["kind"] in ("DeadlineExceeded", "PeerFailed") and "rank 1" in answer["text"]
    assert answer["steps"] == []


TRAINER = """
import sys
import numpy as np
import drivetrain as dt

ckpt = dt.Checkpointer(sys.argv[1])
state = {"w": {f"t{i}": np.zeros((256, 257), np.float32) for i in range(6)}, "extra": {"step": 0}}
start = ckpt.restore(state).step or 0
for step in range(start + 1, start + 1000):
    for array in state["w"].values():
        array += 1
    state["extra"]["step"] = step
    ckpt.save(step, state)
    print(step, flush=True)
"""


def test_killed_while_saving_leaves_the_old_step_or_the_new(tmp_path):
    """SIGKILL at seeded moments of asynchronous saves; each restart goes on from a whole step."""
    rng = random.Random(20261130)
    reached = 0
    for attempt in range(6):
        child = subprocess.Popen(
            [sys.executable, "-c", TRAINER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        started = int(child.stdout.readline())
        for _ in range(rng.randrange(4)):
            started = int(child.stdout.readline())
        time.sleep(rng.random() * 0.05)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        state = {"w": {}, "extra": {}}
        with dt.Checkpointer(tmp_path) as ckpt:
            r = ckpt.restore(state)
        if r.step is None:
            assert reached == 0, "a committed step was lost"
            continue
        assert r.step >= reached and r.skipped == [], attempt
        reached = r.step
        assert state["extra"]["step"] == r.step and len(state["w"]) == 6
        assert all((array == r.step).all() for array in state["w"].values())
        assert started - r.step <= 3, "more than the saves on their way were lost"
    assert reached > 0


STORE_HOST = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def test_a_store_host_that_stands_still_does_not_hold_the_ranks_for_ever(tmp_path, monkeypatch):
    distributed = pytest.importorskip("torch.distributed")
    monkeypatch.setenv("DRIVETRAIN_STORE_TIMEOUT_S", "1")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    host = subprocess.Popen([sys.executable, "-c", STORE_HOST], **pipes)
    try:
        port = int(host.stdout.readline())
        store = distributed.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
        ckpt = _native.Checkpointer(str(tmp_path), 1, 2, timeout_s=120.0, store=store)
        host.send_signal(signal.SIGSTOP)
        for _ in range(2):
            with pytest.raises(_native.DeadlineExceeded, match=r"Store.*stands still"):
                ckpt.agree("restore", "")
    finally:
        host.send_signal(signal.SIGCONT)
        host.kill()
        host.wait()
        host.stdin.close()
        host.stdout.close()
