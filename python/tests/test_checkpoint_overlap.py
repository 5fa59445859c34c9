"""Saves that copy beside the next step, and that nothing saved is ever an alias of what is live."""

import sys
import threading
import time

import drivetrain as dt
import numpy as np
import pytest
import torch
from drivetrain import _native
from torch import nn


class Slow:
    """The native checkpointer, which starts to copy when it is told to."""

    def __init__(self, native, start):
        self._native, self._start = native, start

    def __getattr__(self, name):
        return getattr(self._native, name)

    def save(self, *args, **options):
        assert self._start.wait(20)
        return self._native.save(*args, **options)


def slowed(folder, **options):
    ckpt = dt.Checkpointer(folder, **options)
    start = threading.Event()
    ckpt._native = Slow(ckpt._native, start)
    return ckpt, start


def training(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.randn(32, 8)).square().mean().backward()
    optimizer.step()


def copy_of(model, optimizer):
    slots = [slot.clone() for slots in optimizer.state.values() for slot in slots.values()]
    return [value.clone() for value in model.state_dict().values()] + slots


def restored(folder, **more):
    model, optimizer = training(seed=9)
    with dt.Checkpointer(folder) as ckpt:
        r = ckpt.restore({"model": model, "optimizer": optimizer, **more}, rng=False)
    return r, copy_of(model, optimizer)


def same(left, right):
    return len(left) == len(right) and all(map(torch.equal, left, right))


def test_the_step_waits_for_the_copy_and_buffers_are_copied_at_once(tmp_path):
    model, optimizer = training()
    step(model, optimizer)
    ckpt, start = slowed(tmp_path, staging="overlapped")
    plain, array = torch.arange(9.0), np.arange(9)
    before = copy_of(model, optimizer)
    started = time.perf_counter()
    handle = ckpt.save(
        1, {"model": model, "optimizer": optimizer, "extra": {"plain": plain, "array": array}}
    )
    planned_s = time.perf_counter() - started
    assert not handle.done() and "being staged" in repr(handle)
    plain.zero_()
    array[:] = 0
    optimizer.zero_grad()
    model(torch.randn(32, 8)).square().mean().backward()  # running statistics move on
    threading.Timer(0.3, start.set).start()
    optimizer.step()
    assert start.is_set(), "the step did not wait for the copy"
    assert handle.staged() > 0.2 > 0.0 < planned_s
    assert handle.wait() == 1
    step(model, optimizer)
    ckpt.close()
    assert not sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks
    extra = {"plain": torch.zeros(9), "array": np.zeros(9, int)}
    r, after = restored(tmp_path, extra=extra)
    assert r.step == 1 and same(before, after)
    assert torch.equal(extra["plain"], torch.arange(9.0)) and (extra["array"] == range(9)).all()


def test_parameters_changed_outside_of_a_step_fail_the_save(tmp_path):
    model, optimizer = training()
    ckpt, start = slowed(tmp_path, staging="overlapped")
    handle = ckpt.save(1, {"model": model, "optimizer": optimizer})
    with torch.no_grad():
        model[2].bias.add_(1)
    start.set()
    with pytest.raises(_native.Corrupt, match=r"model\.2\.bias"):
        handle.wait()
    assert ckpt.steps() == [] and ckpt.failed_saves == 1
    assert ckpt.save(2, {"model": model, "optimizer": optimizer}).wait() == 2
    ckpt.close()


def test_saves_stay_in_order_and_close_waits_for_the_last(tmp_path):
    model, optimizer = training()
    with dt.Checkpointer(tmp_path, staging="overlapped", keep=None) as ckpt:
        for number in range(1, 6):
            step(model, optimizer)
            ckpt.save(number, {"model": model, "optimizer": optimizer})
        before = copy_of(model, optimizer)
    r, after = restored(tmp_path)
    assert r.step == 5 and same(before, after)
    with dt.Checkpointer(tmp_path) as ckpt:
        assert ckpt.steps() == [1, 2, 3, 4, 5]


def test_a_staged_save_aliases_nothing(tmp_path):
    model, optimizer = training()
    step(model, optimizer)
    plain, array = torch.arange(9.0), np.arange(9)
    strided = torch.arange(20.0)[::2]
    before = copy_of(model, optimizer)
    with dt.Checkpointer(tmp_path) as ckpt:
        extra = {"plain": plain, "array": array, "strided": strided, "list": [1, {"a": 2}]}
        handle = ckpt.save(1, {"model": model, "optimizer": optimizer, "extra": extra})
        for tensor in (*model.state_dict().values(), plain, strided):
            tensor.data.fill_(7)
        array[:] = 7
        extra["list"][1]["a"] = 7
        step(model, optimizer)
        handle.wait()
    extra = {}
    _, after = restored(tmp_path, extra=extra)
    assert same(before, after) and extra["list"] == [1, {"a": 2}]
    assert torch.equal(extra["plain"], torch.arange(9.0)) and (extra["array"] == range(9)).all()
    assert torch.equal(extra["strided"], torch.arange(20.0)[::2])


def test_policies_are_checked_and_a_stall_beyond_the_budget_warns(tmp_path):
    for wrong in ({"staging": "lazy"}, {"on_busy": "drop"}, {"stall_budget_ms": -1}):
        with pytest.raises(_native.InvalidArgument, match=next(iter(wrong))):
            dt.Checkpointer(tmp_path, **wrong)
    ckpt, start = slowed(tmp_path, on_busy="warn", stall_budget_ms=100)
    threading.Timer(0.3, start.set).start()
    with ckpt, pytest.warns(RuntimeWarning, match="stopped the trainer for"):
        ckpt.save(1, {"n": 1})
