"""Saves and restores of whole objects: filling in place, strictness, policies, lifetimes."""

import collections
import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time

import drivetrain as dt
import numpy as np
import pytest
import torch
from drivetrain import _native
from torch import nn


@pytest.fixture
def ckpt(tmp_path):
    with dt.Checkpointer(tmp_path / "run") as made:
        yield made


def round_trip(ckpt, value, target=None):
    step = (ckpt.steps() or [0])[-1] + 1
    ckpt.save(step, {"v": value}, blocking=True)
    return ckpt.restore({"v": target}).state["v"]


def test_given_containers_are_filled_in_place(ckpt):
    tensor, inner, items = torch.zeros(2), {"n": 0}, [torch.zeros(1), 5]
    live = {"t": tensor, "inner": inner, "items": items, "count": collections.Counter(a=7)}
    saved = {
        "t": torch.ones(2),
        "inner": {"n": 3, "more": 4},
        "items": [torch.ones(1), 6, 7],
        "count": collections.Counter(a=1, b=2),
    }
    first = items[0]
    ckpt.save(1, {"v": saved, "top": 9}, blocking=True)
    given = {"v": live, "top": 0}
    ckpt.restore(given)
    assert given["top"] == 9 and live["t"] is tensor and tensor.tolist() == [1, 1]
    assert live["inner"] is inner and inner == {"n": 3, "more": 4}
    assert (
        live["items"] is items and items[0] is first and first.item() == 1 and items[1:] == [6, 7]
    )
    assert live["count"] == saved["count"]
    empty = {}
    ckpt.restore({"v": empty})
    assert list(empty) == list(saved) and torch.equal(empty["t"], saved["t"])


def test_reserved_and_odd_names_are_refused(ckpt):
    for name in ("~rng", 5):
        with pytest.raises(_native.Unsupported, match="names of saved values"):
            ckpt.save(1, {name: 1}, blocking=True)
    for state in ([1], nn.Linear(1, 1), None):
        with pytest.raises(ValueError, match="state: expected a dict"):
            ckpt.save(1, state)
    for step in (-1, 1.0, True):
        with pytest.raises(ValueError, match="step"):
            ckpt.save(step, {"a": 1})


class Odd:
    def __init__(self, n):
        self.n = n

    def __eq__(self, other):
        return self.n == other.n


def test_pickles_only_by_opt_in_on_both_sides(tmp_path):
    with dt.Checkpointer(tmp_path, allow_pickle=True) as trusting:
        trusting.save(1, {"v": {"odd": Odd(4), "plain": 1}}, blocking=True)
        assert trusting.restore({"v": {}}).state["v"]["odd"] == Odd(4)
    with dt.Checkpointer(tmp_path) as careful:
        with pytest.raises(_native.Unsupported, match=r"v\.odd.*allow_pickle"):
            careful.restore({"v": {}})


def test_tied_tensors_are_stored_once_and_stay_tied(ckpt):
    class Tied(nn.Module):
        def __init__(self, tie=True):
            super().__init__()
            self.a, self.b = nn.Linear(300, 300, bias=False), nn.Linear(300, 300, bias=False)
            if tie:
                self.b.weight = self.a.weight

    model = Tied()
    ckpt.save(1, {"m": model, "again": {"w": model.a.weight}}, blocking=True)
    assert tensor_count(ckpt, 1) == 1
    other = Tied()
    ckpt.restore({"m": other})
    assert torch.equal(other.a.weight, model.a.weight) and other.a.weight is other.b.weight
    loose = Tied(tie=False)
    state = ckpt.restore({"m": loose, "again": None}).state
    assert torch.equal(loose.a.weight, model.a.weight)
    assert torch.equal(loose.b.weight, model.a.weight)
    assert torch.equal(state["again"]["w"], model.a.weight)
    fresh = ckpt.restore({"m": {}, "again": {}}).state
    assert fresh["m"]["a.weight"] is fresh["m"]["b.weight"] is fresh["again"]["w"]
    ckpt.save(2, {"m": loose}, blocking=True)
    assert tensor_count(ckpt, 2) == 2
    ckpt.restore({"m": other})
    assert torch.equal(other.a.weight, loose.b.weight)


def tensor_count(ckpt, step):
    return len(ckpt._native.open(step).tensors())


def test_views_of_one_storage_are_not_mistaken_for_tied(ckpt):
    base = torch.arange(12.0)
    views = {
        "head": base[:6],
        "tail": base[6:],
        "grid": base[:6].reshape(2, 3),
        "bits": base[:6].int(),
    }
    got = round_trip(ckpt, views)
    for key, value in views.items():
        assert torch.equal(got[key], value) and got[key].dtype == value.dtype


class Counting:
    """A user's object with state of its own."""

    def __init__(self, n=0):
        self.n, self.w = n, torch.full((3,), float(n))

    def state_dict(self):
        return {"n": self.n, "w": self.w, "deep": {"l": [self.n]}}

    def load_state_dict(self, state):
        state["deep"]["l"].append("mutated by its receiver")
        self.n, self.w = state["n"], state["w"]


def test_any_object_with_state_takes_part(ckpt):
    ckpt.save(1, {"c": Counting(5), "nest": {"c": Counting(6), "n": 1}}, blocking=True)
    live, inner = Counting(), {"c": Counting(), "n": 0}
    kept = inner["c"]
    r = ckpt.restore({"c": live, "nest": inner})
    assert live.n == 5 and live.w.tolist() == [5, 5, 5]
    assert inner["c"] is kept and kept.n == 6 and inner["n"] == 1
    assert r.state["c"]["deep"] == {"l": [5]}


def test_wrapped_models_share_names_with_plain_ones(ckpt):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    ckpt.save(1, {"m": nn.DataParallel(model), "c": torch.compile(model)}, blocking=True)
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    r = ckpt.restore({"m": plain, "c": plain})
    assert list(r.state["m"]) == list(model.state_dict()) == list(r.state["c"])
    assert torch.equal(plain[0].weight, model[0].weight)


class WithExtra(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.note = nn.Linear(2, 2), None

    def get_extra_state(self):
        return {"note": self.note}

    def set_extra_state(self, state):
        self.note = state["note"]


def test_extra_state_lazy_modules_and_hooks_go_through_load_state_dict(ckpt):
    model = WithExtra()
    model.note = (1, "x")
    lazy = nn.LazyLinear(3)
    lazy(torch.ones(1, 4))
    ckpt.save(1, {"m": model, "lazy": lazy, "hooked": nn.Linear(2, 2)}, blocking=True)
    again, fresh, calls = WithExtra(), nn.LazyLinear(3), []
    hooked = nn.Linear(2, 2)
    hooked.register_load_state_dict_post_hook(lambda module, keys: calls.append(keys))
    ckpt.restore({"m": again, "lazy": fresh, "hooked": hooked})
    assert again.note == (1, "x") and torch.equal(again.lin.weight, model.lin.weight)
    assert torch.equal(fresh.weight, lazy.weight) and len(calls) == 1


def test_strict_names_what_differs_and_touches_nothing(ckpt):
    ckpt.save(1, {"m": nn.Linear(2, 2), "e": {"a": 1}}, blocking=True)
    target = nn.Sequential(nn.Linear(2, 2))
    before = target[0].weight.clone()
    with pytest.raises(ValueError, match=r"lacks: m\.0\.weight, m\.0\.bias.*beyond.*m\.weight"):
        ckpt.restore({"m": target})
    with pytest.raises(ValueError, match=r"lacks: e\.b, gone"):
        ckpt.restore({"e": {"a": 0, "b": 0}, "gone": {}})
    with pytest.raises(ValueError, match=r"m\.weight.*\[3, 3\].*\[2, 2\]"):
        ckpt.restore({"m": nn.Linear(3, 3)})
    assert torch.equal(target[0].weight, before)
    part = nn.Linear(2, 2, bias=False)
    r = ckpt.restore({"m": part, "gone": {}, "e": (live := {"a": 0, "b": 7})}, strict=False)
    assert r.missing == ["e.b", "gone"] or set(r.missing) == {"e.b", "gone"}
    assert r.unexpected == ["m.bias"] and live == {"a": 1, "b": 7}


def test_nothing_to_restore_touches_nothing(ckpt):
    live = {"n": 1}
    state = random.getstate()
    r = ckpt.restore({"v": live})
    assert r.step is None and r.skipped == [] and r.state == {} and live == {"n": 1}
    assert random.getstate() == state
    with pytest.raises(FileNotFoundError, match="step 3"):
        ckpt.restore({"v": live}, step=3)


def test_generators_continue(ckpt):
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    random.gauss(0, 1)
    np.random.standard_normal()
    ckpt.save(1, {"n": 1}, blocking=True)

    def draw():
        mine = (random.gauss(0, 1), random.random())
        return (*mine, np.random.standard_normal(), torch.rand(2).tolist())

    expected = draw()
    ckpt.restore({"n": 0})
    assert draw() == expected
    kept = dt.rng_state()
    after = draw()
    ckpt.restore({"n": 0}, rng=False)
    assert draw() != expected
    dt.set_rng_state(kept)
    assert draw() == after
    ckpt.save(2, {"n": 1}, blocking=True, rng=False)
    kept = dt.rng_state()
    after = draw()
    dt.set_rng_state(kept)
    ckpt.restore({"n": 0})
    assert draw() == after


def test_per_rank_values_come_back(ckpt):
    value = {
        "seed": 3,
        "small": torch.arange(4),
        "large": torch.randn(200, 200),
        "np": np.arange(3),
    }
    ckpt.save(1, {"r": dt.PerRank(value), "d": {"inner": dt.PerRank(5)}}, blocking=True)
    holder, live = dt.PerRank(None), {"inner": dt.PerRank(0)}
    r = ckpt.restore({"r": holder, "d": live})
    assert r.state["r"]["seed"] == 3 and torch.equal(r.state["r"]["large"], value["large"])
    assert torch.equal(holder.value["small"], value["small"]) and live["inner"].value == 5
    assert r.state["d"] == {"inner": 5} and r.per_rank_mapped == {}
    large = torch.zeros(200, 200)
    small = torch.zeros(4, dtype=torch.int64)
    ckpt.restore({"r": {"large": large, "small": small}})
    assert torch.equal(large, value["large"]) and torch.equal(small, value["small"])


def test_sharded_helper_on_one_rank(ckpt):
    whole = torch.arange(12.0).reshape(3, 4)
    ckpt.save(1, {"v": dt.Sharded(whole, (3, 4), (0, 0))}, blocking=True)
    part = torch.zeros(2, 2)
    ckpt.restore({"v": dt.Sharded(part, (3, 4), (1, 2))})
    assert torch.equal(part, whole[1:3, 2:4])
    assert torch.equal(ckpt.restore({"v": None}).state["v"], whole)
    with pytest.raises(ValueError, match="inside"):
        dt.Sharded(part, (3, 4), (2, 2))


def test_committed_steps_are_not_replaced_unless_asked(ckpt):
    ckpt.save(1, {"n": 1}, blocking=True)
    with pytest.raises(FileExistsError):
        ckpt.save(1, {"n": 2}, blocking=True)
    assert ckpt.restore({"n": 0}).state["n"] == 1
    ckpt.save(1, {"n": 2}, blocking=True, overwrite=True)
    assert ckpt.restore({"n": 0}).state["n"] == 2 and ckpt.steps() == [1]


def test_retention_and_steps(tmp_path):
    with dt.Checkpointer(tmp_path, keep=dt.Keep(last=2, every=4)) as ckpt:
        for step in range(1, 8):
            ckpt.save(step, {"n": step}).wait()
        assert ckpt.steps() == [4, 6, 7]
    with pytest.raises(ValueError, match="Keep"):
        dt.Keep(last=0)


def test_snapshot_is_taken_before_save_returns(ckpt):
    model = nn.Linear(100, 100)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    count = torch.zeros(1)
    want = [model.weight.detach().clone(), optimizer.state[model.weight]["step"].clone()]
    array, extra = np.ones(5), {"n": [1]}
    state = {"m": model, "o": optimizer, "c": {"c": count, "a": array}, "e": extra}
    handle = ckpt.save(1, state)
    assert handle.staged() >= 0
    optimizer.step()
    count.add_(1)
    array += 1
    extra["n"].append(2)
    assert handle.wait("1min") == 1 and handle.done() and handle.wait() == 1
    got = ckpt.restore({"m": {}, "o": {}, "c": {}, "e": {}}).state
    assert torch.equal(got["m"]["weight"], want[0])
    assert torch.equal(got["o"]["state"]["weight"]["step"], want[1])
    assert got["c"]["c"].item() == 0 and got["c"]["a"].tolist() == [1] * 5
    assert got["e"] == {"n": [1]}


def test_durations_and_arguments_are_checked(tmp_path):
    for timeout in ("10 parsecs", -1, "min", None, float("nan"), True):
        with pytest.raises(ValueError, match="timeout"):
            dt.Checkpointer(tmp_path, timeout=timeout)
    with pytest.raises(ValueError, match="on_error"):
        dt.Checkpointer(tmp_path, on_error="ignore")
    with pytest.raises(ValueError, match="guard"):
        dt.Checkpointer(tmp_path, guard="hope")
    with pytest.raises(ValueError, match="rank"):
        dt.Checkpointer(tmp_path, rank=2, world_size=2)
    with pytest.raises(ValueError, match="both"):
        dt.Checkpointer(tmp_path, rank=0)


def test_rank_and_world_come_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with dt.Checkpointer(tmp_path) as ckpt:
        assert (ckpt.rank, ckpt.world_size) == (0, 1)
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(ValueError, match="WORLD_SIZE"):
        dt.Checkpointer(tmp_path)


def test_closed_checkpointers_say_so(tmp_path):
    ckpt = dt.Checkpointer(tmp_path)
    ckpt.save(1, {"n": 1})
    ckpt.close()
    ckpt.close()
    for call in (lambda: ckpt.save(2, {"n": 1}), lambda: ckpt.restore({}), ckpt.steps):
        with pytest.raises(_native.Closed):
            call()
    with dt.Checkpointer(tmp_path) as again:
        assert again.steps() == [1]


def fork_and_save(ckpt, answer):
    try:
        ckpt.save(5, {"n": 1})
    except Exception as error:
        answer.put((type(error).__name__, str(error)))


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_is_told(ckpt):
    ckpt.save(1, {"n": 1}, blocking=True)
    context = multiprocessing.get_context("fork")
    answer = context.Queue()
    child = context.Process(target=fork_and_save, args=(ckpt, answer))
    child.start()
    kind, text = answer.get(timeout=60)
    child.join(60)
    assert kind == "Unsupported" and "after the fork" in text and child.exitcode == 0
    assert ckpt.steps() == [1]


def test_ctrl_c_interrupts_a_wait(ckpt):
    class Never:
        staged_seconds = 0.0

        def done(self):
            return False

        def wait(self, timeout_s):
            time.sleep(min(timeout_s, 0.05))
            raise _native.DeadlineExceeded("not yet")

    from drivetrain._checkpoint.handle import SaveHandle

    handle = SaveHandle(1, Never())
    with pytest.raises(_native.DeadlineExceeded, match="wait again"):
        handle.wait("100ms")
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        handle.wait()


def test_numpy_only_programs_do_not_import_torch(tmp_path):
    code = """
import sys
import numpy as np
import drivetrain as dt
with dt.Checkpointer(sys.argv[1]) as ckpt:
    ckpt.save(1, {"w": {"a": np.arange(5.0), "n": 3}}, blocking=True)
    live = np.zeros(5)
    assert ckpt.restore({"w": {"a": live, "n": 0}}).step == 1
    assert live.tolist() == [0, 1, 2, 3, 4]
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def test_a_save_on_its_way_is_finished_at_exit(tmp_path):
    code = """
import sys, torch
import drivetrain as dt

# more threads than cores only fight over them
torch.set_num_threads(1)
ckpt = dt.Checkpointer(sys.argv[1])
ckpt.save(7, {"w": torch.ones(1 << 20)})
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    with dt.Checkpointer(tmp_path) as ckpt:
        assert ckpt.steps() == [7]


def test_save_load_save_is_a_fixed_point(ckpt):
    def texts(step):
        opened = ckpt._native.open(step)
        return opened.state_json(), opened.per_rank_json(0), opened.tensors()

    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 / 3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    extra = {"loss": [1 / 3, math.nan, -0.0, 1e300], 7: (1, ())}
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "extra": extra}
    ckpt.save(1, state, blocking=True)
    with torch.no_grad():
        model[0].weight.zero_()
    fresh = torch.optim.AdamW(model.parameters())
    again = {
        "model": model,
        "optimizer": fresh,
        "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(fresh, 2),
        "extra": {},
    }
    ckpt.restore(again)
    ckpt.save(2, again, blocking=True)
    assert texts(2) == texts(1)
