"""Tensors and keys at the edges: packed types, odd names, frozen parameters, huge ones."""

import os

import drivetrain as dt
import numpy as np
import pytest
import torch
from drivetrain import _native
from torch import nn

torch.set_num_threads(1)


@pytest.fixture
def ckpt(tmp_path):
    with dt.Checkpointer(tmp_path / "run") as made:
        yield made


@pytest.mark.parametrize(
    "name", ["float8_e5m2fnuz", "float4_e2m1fn_x2", "uint1", "uint4", "uint7", "int4", "bits8"]
)
def test_types_that_only_newer_torch_has_keep_their_bytes(ckpt, name):
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    raw = torch.arange(12, dtype=torch.uint8).reshape(3, 4)
    ckpt.save(1, {"v": {"t": raw.view(dtype)}}, blocking=True)
    live = torch.zeros(3, 4, dtype=torch.uint8).view(dtype)
    fresh = ckpt.restore({"v": {}}).state["v"]["t"]
    ckpt.restore({"v": {"t": live}})
    for got in (fresh, live):
        assert got.dtype is dtype and torch.equal(got.view(torch.uint8), raw)


KEYS = [
    "with.dots",
    "with/slash",
    "..",
    "/",
    "with space",
    " ",
    "",
    "\u00e4\u20ac\U0001f697",
    'quote"back\\slash',
    "new\nline\ttab\x00nul\x1f",
    "__metadata__",
    "__pad.0",
    "a@0,0",
    "a~1",
    "[0]",
    "~tensor",
    "~5",
    0,
    -7,
    2**40,
    5,
    "5",
]


def test_any_key_names_its_own_tensor(ckpt):
    state = {key: torch.tensor([n, n + 1]) for n, key in enumerate(KEYS)}
    state["deep"] = {key: {key: torch.tensor(float(n))} for n, key in enumerate(KEYS)}
    # paths that join to the same text
    state["a"] = {"b.c": torch.tensor(1), "b": {"c": torch.tensor(2)}, "b.": {"c": torch.tensor(3)}}
    ckpt.save(1, {"v": state}, blocking=True)
    got = ckpt.restore({"v": {}}).state["v"]
    assert list(got) == list(state)
    for n, key in enumerate(KEYS):
        assert got[key].tolist() == [n, n + 1], repr(key)
        assert got["deep"][key][key].item() == n, repr(key)
    joined = got["a"]["b.c"], got["a"]["b"]["c"], got["a"]["b."]["c"]
    assert [one.item() for one in joined] == [1, 2, 3]
    assert ckpt.verify(1).ok


def trained(model, parameters=None):
    optimizer = torch.optim.AdamW(parameters or model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    return optimizer


def test_frozen_parameters_and_those_frozen_later(ckpt):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].weight.requires_grad_(False)
    optimizer = trained(model)
    assert model[0].weight not in optimizer.state
    ckpt.save(1, {"model": model, "optimizer": optimizer}, blocking=True)

    again = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    again[1].weight.requires_grad_(False)  # frozen only now
    fresh = torch.optim.AdamW(again.parameters())
    ckpt.restore({"model": again, "optimizer": fresh})
    assert torch.equal(again[0].weight, model[0].weight) and again[0].weight.requires_grad
    assert not again[1].weight.requires_grad and torch.equal(again[1].weight, model[1].weight)
    assert again[0].weight not in fresh.state
    want = optimizer.state[model[1].weight]["exp_avg"]
    assert torch.equal(fresh.state[again[1].weight]["exp_avg"], want)


def test_an_optimizer_of_fewer_parameters_needs_strict_off(ckpt):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizer = trained(model)
    ckpt.save(1, {"model": model, "optimizer": optimizer}, blocking=True)
    again = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    fewer = torch.optim.AdamW(again[1].parameters())
    with pytest.raises(_native.InvalidArgument, match=r"0\.weight"):
        ckpt.restore({"model": again, "optimizer": fewer})
    ckpt.restore({"model": again, "optimizer": fewer}, strict=False)
    want = optimizer.state[model[1].bias]["exp_avg"]
    assert torch.equal(fewer.state[again[1].bias]["exp_avg"], want)
    assert len(fewer.state) == 2


def test_views_that_overlap_are_stored_by_value(ckpt):
    base = torch.arange(10.0)
    state = {"low": base[:6], "high": base[4:], "same": base[:6]}
    ckpt.save(1, {"v": state}, blocking=True)
    got = ckpt.restore({"v": {}}).state["v"]
    assert torch.equal(got["low"], base[:6]) and torch.equal(got["high"], base[4:])
    got["low"][5] = -1
    assert got["high"][1] == 5 and got["same"] is got["low"]


@pytest.mark.skipif("DRIVETRAIN_LONG" not in os.environ, reason="10 GiB of disk; make test-long")
def test_more_than_4_gib_and_2_to_the_31_elements(tmp_path):
    """Sparse files stand for memory, the staging slot included."""
    count = 2**32 + 12_345
    marks = [0, 2**31 - 1, 2**31, 2**32 - 1, 2**32, count - 1]
    big = np.memmap(tmp_path / "big", np.uint8, "w+", shape=(count,))
    big[marks] = range(1, 7)
    with dt.Checkpointer(tmp_path / "run", shm_dir=tmp_path) as ckpt:
        ckpt.save(1, {"v": torch.from_numpy(big)}, blocking=True)
        back = np.memmap(tmp_path / "back", np.uint8, "w+", shape=(count,))
        ckpt.restore({"v": torch.from_numpy(back)})
    assert back[marks].tolist() == list(range(1, 7))
    assert int(np.count_nonzero(back)) == 6
