"""Renames on restore: patterns, functions, stacking and taking apart; reported beforehand."""

import drivetrain as dt
import pytest
import torch
from drivetrain import _native
from torch import nn

torch.set_num_threads(1)
LAYERS = 3


class Listed(nn.Module):
    """Layers one by one."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(4, 5) for _ in range(LAYERS))
        self.head = nn.Linear(5, 2)


class Stacked(nn.Module):
    """The same layers as one tensor."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Module()
        self.body.w = nn.Parameter(torch.randn(LAYERS, 5, 4))
        self.body.b = nn.Parameter(torch.randn(LAYERS, 5))
        self.top = nn.Linear(5, 2)


TO_STACKED = {
    "model.layers.{i}.weight": "model.body.w[{i}]",
    "model.layers.{i}.bias": "model.body.b[{i}]",
    "model.head.*": "model.top.*",
}
TO_LISTED = {
    "model.body.w[{i}]": "model.layers.{i}.weight",
    "model.body.b[{i}]": "model.layers.{i}.bias",
    "model.top.{what}": "model.head.{what}",
}


def with_state(model):
    """An AdamW whose state is recognisable: exp_avg is three times the parameter."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for parameter in model.parameters():
        optimizer.state[parameter]["exp_avg"].copy_(parameter.detach() * 3)
    return optimizer


@pytest.fixture
def ckpt(tmp_path):
    with dt.Checkpointer(tmp_path / "run") as made:
        yield made


def saved(ckpt, model):
    optimizer = with_state(model)
    ckpt.save(1, {"model": model, "optimizer": optimizer}, blocking=True)
    return optimizer


def check_follows(model, optimizer):
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        assert torch.equal(state["exp_avg"], parameter.detach() * 3)
        assert state["step"].item() == 1 and state["exp_avg_sq"].shape == parameter.shape


def test_layers_are_stacked_and_taken_apart_with_their_optimizer(ckpt):
    listed = Listed(1)
    saved(ckpt, listed)
    stacked = Stacked(2)
    optimizer = torch.optim.AdamW(stacked.parameters())
    r = ckpt.restore({"model": stacked, "optimizer": optimizer}, rename=TO_STACKED)
    for i, layer in enumerate(listed.layers):
        assert torch.equal(stacked.body.w[i], layer.weight)
        assert torch.equal(stacked.body.b[i], layer.bias)
    assert torch.equal(stacked.top.weight, listed.head.weight)
    assert r.renamed["model.layers.2.weight"] == "model.body.w[2]"
    check_follows(stacked, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.01

    ckpt.save(2, {"model": stacked, "optimizer": optimizer}, blocking=True)
    again = Listed(3)
    fresh = torch.optim.AdamW(again.parameters())
    ckpt.restore({"model": again, "optimizer": fresh}, rename=TO_LISTED)
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, listed.get_parameter(name)), name
    check_follows(again, fresh)


def test_functions_rename_split_and_leave_out(ckpt):
    weights = torch.arange(12.0).reshape(3, 4)
    state = {"v": {"experts": weights, "old.name": torch.ones(2), "gone": torch.zeros(1)}}
    ckpt.save(1, state, blocking=True)

    def rename(name):
        if name == "v.experts":
            return [f"v.e{row}" for row in range(3)]
        return None if name == "v.gone" else name.replace("old.", "new.")

    live = {f"e{i}": torch.zeros(4) for i in range(3)} | {"new.name": torch.zeros(2)}
    r = ckpt.restore({"v": live}, rename=rename)
    assert torch.equal(live["new.name"], torch.ones(2)) and set(r.state["v"]) == set(live)
    for i in range(3):
        assert torch.equal(live[f"e{i}"], weights[i])
    with pytest.raises(_native.InvalidArgument, match="one name per row"):
        ckpt.restore({"v": live}, rename=lambda name: ["a", "b"])


def test_shards_and_flat_ranges_of_stacks(ckpt):
    rows = [torch.arange(6.0).reshape(2, 3) + 10 * i for i in range(4)]
    ckpt.save(1, {"v": {f"l{i}": row for i, row in enumerate(rows)}}, blocking=True)
    whole = torch.stack(rows)
    stack = {"v.l{i}": "v.s[{i}]"}
    part = dt.Sharded(torch.zeros(2, 2, 2), (4, 2, 3), (1, 0, 1))
    ckpt.restore({"v": {"s": part}}, rename=stack)
    assert torch.equal(part.tensor, whole[1:3, :, 1:])
    for start, count in [(0, 24), (5, 1), (4, 13), (6, 6), (23, 1), (7, 0)]:
        flat = dt.Sharded.flat(torch.full((count,), -1.0), (4, 2, 3), start)
        ckpt.restore({"v": {"s": flat}}, rename=stack)
        assert torch.equal(flat.tensor, whole.flatten()[start : start + count]), (start, count)

    ckpt.save(2, {"v": {"s": whole}}, blocking=True)
    apart = {"v.s[{i}]": "v.l{i}"}
    live = {
        "l0": dt.Sharded.flat(torch.zeros(3), (2, 3), 2),
        "l1": dt.Sharded(torch.zeros(1, 2), (2, 3), (1, 1)),
        "l2": torch.zeros(2, 3, dtype=torch.float64),
        "l3": torch.zeros(3, 2).T,
    }
    ckpt.restore({"v": live}, rename=apart)
    assert torch.equal(live["l0"].tensor, rows[0].flatten()[2:5])
    assert torch.equal(live["l1"].tensor, rows[1][1:, 1:])
    assert torch.equal(live["l2"].float(), rows[2]) and torch.equal(live["l3"], rows[3])
    fresh = {}
    ckpt.restore({"v": fresh}, rename=apart)
    assert all(torch.equal(fresh[f"l{i}"], row) for i, row in enumerate(rows))


def test_a_plan_says_what_would_happen_and_touches_nothing(ckpt):
    saved(ckpt, Listed(1))
    stacked = Stacked(2)
    before = {name: p.clone() for name, p in stacked.named_parameters()}
    plan = ckpt.plan({"model": stacked}, rename=TO_STACKED)
    assert plan.step == 1 and plan.ok
    assert plan.renamed["model.head.bias"] == "model.top.bias"
    assert plan.loaded == ["model.body.b", "model.body.w", "model.top.bias", "model.top.weight"]
    assert plan.nbytes == sum(4 * p.numel() for p in stacked.parameters())
    less = dict(TO_STACKED)
    del less["model.head.*"]
    plan = ckpt.plan({"model": stacked}, rename=less)
    assert not plan.ok and plan.missing == ["model.top.weight", "model.top.bias"]
    assert plan.unexpected == ["model.head.weight", "model.head.bias"]
    wide = nn.Linear(5, 3)
    ckpt.save(2, {"model": nn.Linear(5, 2)}, blocking=True)
    plan = ckpt.plan({"model": wide})
    assert plan.reshaped == [
        ("model.weight", (2, 5), (3, 5)),
        ("model.bias", (2,), (3,)),
    ]
    for name, parameter in stacked.named_parameters():
        assert torch.equal(parameter, before[name])
    assert ckpt.plan({"model": wide}, step=2).step == 2


def test_nothing_committed_plans_nothing(ckpt):
    assert ckpt.plan({"model": nn.Linear(1, 1)}).step is None


def test_rows_that_nobody_saved_are_named(ckpt):
    ckpt.save(1, {"v": {"l0": torch.zeros(2), "l2": torch.zeros(2)}}, blocking=True)
    live = {"s": torch.ones(3, 2)}
    plan = ckpt.plan({"v": live}, rename={"v.l{i}": "v.s[{i}]"})
    assert plan.missing == ["v.s[1]"]
    with pytest.raises(_native.InvalidArgument, match=r"v\.s\[1\]"):
        ckpt.restore({"v": live}, rename={"v.l{i}": "v.s[{i}]"})
    assert torch.equal(live["s"], torch.ones(3, 2))


def test_two_tensors_for_one_name_are_refused(ckpt):
    state = {"v": {"a": torch.zeros(2), "b": torch.ones(2), "c": torch.zeros(3)}}
    ckpt.save(1, state, blocking=True)
    live = {"v": {"a": torch.zeros(2)}}
    for rename in ({"v.b": "v.a"}, {"v.a": "v.x", "v.b": "v.x"}, {"v.{n}": "v.s[0]"}):
        with pytest.raises(_native.InvalidArgument, match="rename"):
            ckpt.restore(live, rename=rename)
    with pytest.raises(_native.InvalidArgument, match="row 1"):
        ckpt.restore(live, rename={"v.a": "v.s[0]", "v.c": "v.s[1]"})


@pytest.mark.parametrize(
    "rename", [{"v.{i}": "v.{j}"}, {"v.a": "v.*"}, {1: "v"}, [("a", None)], {"v.{1}": "x"}]
)
def test_patterns_that_cannot_be_are_refused(ckpt, rename):
    ckpt.save(1, {"v": {"a": torch.zeros(2)}}, blocking=True)
    with pytest.raises(_native.InvalidArgument, match="rename"):
        ckpt.restore({"v": {}}, rename=rename)


def test_without_strict_what_fits_is_loaded_and_the_rest_reported(ckpt):
    old = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 2), "c": nn.Linear(1, 1)})
    optimizer = with_state(old)
    ckpt.save(1, {"model": old, "optimizer": optimizer}, blocking=True)
    new = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 4), "d": nn.Linear(1, 1)})
    kept = new["b"].weight.detach().clone()
    fresh = torch.optim.AdamW(new.parameters())
    with pytest.raises(_native.InvalidArgument, match=r"model\.b\.weight.*\[4, 3\].*\[2, 3\]"):
        ckpt.restore({"model": new})
    r = ckpt.restore({"optimizer": fresh, "model": new}, strict=False)
    assert torch.equal(new["a"].weight, old["a"].weight)
    assert torch.equal(new["b"].weight, kept)
    assert ("model.b.weight", (2, 3), (4, 3)) in r.reshaped
    assert "model.d.weight" in r.missing and "model.c.weight" in r.unexpected
    assert torch.equal(fresh.state[new["a"].weight]["exp_avg"], old["a"].weight.detach() * 3)
    assert new["b"].weight not in fresh.state and new["d"].weight not in fresh.state
    for parameter in new.parameters():
        parameter.grad = torch.ones_like(parameter)
    fresh.step()
