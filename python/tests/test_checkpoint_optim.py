"""Every optimizer and scheduler of torch.optim: training after a restore continues bit for bit."""

import drivetrain as dt
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

# more threads than cores only fight over them
torch.set_num_threads(1)

STEPS = 4


class Net(nn.Module):
    """A little of everything an optimizer may meet: matrices, vectors, a scalar, a frozen part."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.norm = nn.LayerNorm(5)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.last = nn.Linear(5, 3)
        self.frozen = nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.to(dtype)

    def forward(self, x):
        return self.frozen(self.last(self.norm(self.first(x))) * self.scale)


class Matrices(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 5, bias=False), nn.Linear(5, 3, bias=False)

    def forward(self, x):
        return self.b(self.a(x))


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 3, sparse=True)

    def forward(self, x):
        return self.table((x.float().abs() * 3).long().clamp(max=8)).sum(1)


def loss_at(model, step, dtype=torch.float32):
    batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).to(dtype)
    return model(batch).float().square().mean()


def train(model, optimizer, start, steps=STEPS, scheduler=None, dtype=torch.float32):
    losses = []
    for step in range(start, start + steps):

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_at(model, step, dtype)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
        if isinstance(scheduler, schedules.ReduceLROnPlateau):
            scheduler.step(losses[-1])
        elif scheduler is not None:
            scheduler.step()
    return losses


def same_tree(a, b, where=""):
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert list(a) == list(b), where
        for key in a:
            same_tree(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for at, (x, y) in enumerate(zip(a, b)):
            same_tree(x, y, f"{where}.{at}")
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape and a.device == b.device, where
        assert torch.equal(a, b), where
    else:
        assert a == b or a != a, where


OPTIMIZERS = [
    ("ASGD", {"lr": 0.05, "t0": 2, "lambd": 0.01}),
    ("Adadelta", {}),
    ("Adadelta", {"capturable": False, "foreach": True}),
    ("Adafactor", {"lr": 0.05}),
    ("Adafactor", {"lr": 0.05, "beta2_decay": -0.5, "foreach": False}),
    ("Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.1}),
    ("Adam", {"lr": 0.01}),
    ("Adam", {"lr": 0.01, "amsgrad": True, "foreach": False}),
    ("Adam", {"lr": 0.01, "fused": True}),
    ("Adam", {"lr": torch.tensor(0.01), "foreach": False}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.01, "fused": True, "amsgrad": True}),
    ("Adamax", {"lr": 0.01}),
    ("LBFGS", {"lr": 0.1, "history_size": 3}),
    ("LBFGS", {"lr": 0.5, "history_size": 2, "line_search_fn": "strong_wolfe"}),
    ("Muon", {"lr": 0.01}),
    ("NAdam", {"lr": 0.01, "decoupled_weight_decay": True}),
    ("RAdam", {"lr": 0.01}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True}),
    ("RMSprop", {"lr": 0.01}),
    ("Rprop", {"lr": 0.01}),
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "fused": True}),
    ("SparseAdam", {"lr": 0.01}),
]


def test_the_list_names_every_optimizer():
    known = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    assert known - {"Optimizer"} == {name for name, _ in OPTIMIZERS} & known


def make(name, options, seed):
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    torch.manual_seed(seed)
    model = {"Muon": Matrices, "SparseAdam": Sparse}.get(name, Net)()
    options = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    trainable = [p for p in model.parameters() if p.requires_grad]
    return model, getattr(torch.optim, name)(trainable, **options)


@pytest.mark.parametrize("named", [True, False], ids=["by name", "by number"])
@pytest.mark.parametrize(("name", "options"), OPTIMIZERS, ids=lambda v: str(v)[:60])
def test_optimizer_continues_bit_for_bit(tmp_path, name, options, named):
    model, optimizer = make(name, options, seed=1)
    train(model, optimizer, 0)
    with dt.Checkpointer(tmp_path) as ckpt:
        first = {"model": model, "optimizer": optimizer}
        if named:
            ckpt.save(STEPS, first, blocking=True)
        else:
            ckpt.save(STEPS, {"o": optimizer, "w": dict(model.state_dict())}, blocking=True)
        at_save = optimizer.state_dict()
        at_save = torch.utils._pytree.tree_map(
            lambda v: v.clone() if isinstance(v, torch.Tensor) else v, at_save
        )
        expected = train(model, optimizer, STEPS)

        again, fresh = make(name, options, seed=2)
        target = {"model": again, "optimizer": fresh}
        if not named:
            target = {"o": fresh, "w": dict(again.state_dict())}
        assert ckpt.restore(target).step == STEPS
        same_tree(fresh.state_dict(), at_save)
        assert train(again, fresh, STEPS) == expected
        same_tree(dict(again.state_dict()), dict(model.state_dict()))
        same_tree(fresh.state_dict(), optimizer.state_dict())

        # a second restore lands in the state the optimizer has by now, and gives the same
        ckpt.restore(target)
        assert train(again, fresh, STEPS) == expected


SCHEDULERS = [
    ("LambdaLR", lambda o: schedules.LambdaLR(o, lambda e: 0.9**e)),
    ("LambdaLR object", lambda o: schedules.LambdaLR(o, Decay(0.9))),
    ("MultiplicativeLR", lambda o: schedules.MultiplicativeLR(o, lambda e: 0.9)),
    ("StepLR", lambda o: schedules.StepLR(o, 2)),
    ("MultiStepLR", lambda o: schedules.MultiStepLR(o, [2, 5, 5], 0.5)),
    ("ConstantLR", lambda o: schedules.ConstantLR(o, 0.5, 5)),
    ("LinearLR", lambda o: schedules.LinearLR(o, 0.1, total_iters=6)),
    ("ExponentialLR", lambda o: schedules.ExponentialLR(o, 0.9)),
    ("PolynomialLR", lambda o: schedules.PolynomialLR(o, 7, 0.9)),
    ("CosineAnnealingLR", lambda o: schedules.CosineAnnealingLR(o, 7)),
    ("CosineAnnealingWarmRestarts", lambda o: schedules.CosineAnnealingWarmRestarts(o, 3, 2)),
    ("CyclicLR", lambda o: schedules.CyclicLR(o, 0.01, 0.1, 3, cycle_momentum=False)),
    ("CyclicLR momentum", lambda o: schedules.CyclicLR(o, 0.01, 0.1, 3, mode="exp_range")),
    ("OneCycleLR", lambda o: schedules.OneCycleLR(o, 0.1, total_steps=20)),
    ("ReduceLROnPlateau", lambda o: schedules.ReduceLROnPlateau(o, patience=0, threshold=0.5)),
    ("SequentialLR", lambda o: sequential(o)),
    (
        "ChainedScheduler",
        lambda o: schedules.ChainedScheduler(
            [schedules.ExponentialLR(o, 0.9), schedules.ConstantLR(o, 0.1, 3)], optimizer=o
        ),
    ),
]


class Decay:
    def __init__(self, base):
        self.base = base

    def __call__(self, epoch):
        return self.base**epoch


def sequential(optimizer):
    parts = [
        schedules.LinearLR(optimizer, 0.1, total_iters=3),
        schedules.ExponentialLR(optimizer, 0.9),
    ]
    return schedules.SequentialLR(optimizer, parts, [3])


def test_the_list_names_every_scheduler():
    known = {
        name
        for name, kind in vars(schedules).items()
        if isinstance(kind, type)
        and issubclass(kind, schedules.LRScheduler)
        and not name.startswith("_")
    }
    assert known - {"LRScheduler"} == {name.split()[0] for name, _ in SCHEDULERS}


def rates(optimizer):
    return [
        (group["lr"], group.get("momentum"), group.get("initial_lr"))
        for group in optimizer.param_groups
    ]


@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float lr", "tensor lr"])
@pytest.mark.parametrize(
    "make_scheduler", [m for _, m in SCHEDULERS], ids=[n for n, _ in SCHEDULERS]
)
def test_scheduler_continues_bit_for_bit(tmp_path, make_scheduler, tensor_lr):
    def make_all(seed):
        torch.manual_seed(seed)
        model = Net()
        groups = [
            {"params": model.first.parameters(), "lr": torch.tensor(0.2) if tensor_lr else 0.2},
            {"params": model.last.parameters()},
        ]
        lr = torch.tensor(0.1) if tensor_lr else 0.1
        optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.9, foreach=False)
        return model, optimizer, make_scheduler(optimizer)

    model, optimizer, scheduler = make_all(1)
    train(model, optimizer, 0, scheduler=scheduler)
    with dt.Checkpointer(tmp_path) as ckpt:
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        ckpt.save(STEPS, state, blocking=True)
        expected = train(model, optimizer, STEPS, 8, scheduler)

        again, fresh, fresh_scheduler = make_all(2)
        ckpt.restore({"model": again, "optimizer": fresh, "scheduler": fresh_scheduler})
        assert train(again, fresh, STEPS, 8, fresh_scheduler) == expected
        assert rates(fresh) == rates(optimizer)
        same_tree(strip(fresh_scheduler.state_dict()), strip(scheduler.state_dict()))


def strip(state):
    """Without bound functions, which a state dict has but nobody saves."""
    return {k: v for k, v in state.items() if not callable(v)}


def test_fields_the_fresh_optimizer_lacks_come_back(tmp_path):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedules.StepLR(optimizer, 1)
    optimizer.param_groups[0]["note"] = {"warm": (1, 2)}
    with dt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(0, {"model": model, "optimizer": optimizer}, blocking=True)
        fresh = torch.optim.SGD(model.parameters(), lr=0.7)
        ckpt.restore({"model": model, "optimizer": fresh})
    assert fresh.param_groups[0]["initial_lr"] == 0.1
    assert fresh.param_groups[0]["note"] == {"warm": (1, 2)}


def test_names_find_parameters_in_another_order(tmp_path):
    model = Net()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    train(model, optimizer, 0)
    with dt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"model": model, "optimizer": optimizer}, blocking=True)
        again = Net()
        backwards = reversed([p for p in again.parameters() if p.requires_grad])
        fresh = torch.optim.Adam(backwards)
        ckpt.restore({"model": again, "optimizer": fresh})
    for (name, mine), theirs in zip(again.named_parameters(), model.parameters()):
        assert torch.equal(mine, theirs)
        if mine.requires_grad:
            same_tree(fresh.state[mine], optimizer.state[theirs], name)


def test_groups_with_other_parameters_are_refused_by_name(tmp_path):
    model = Net()
    with dt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"m": model, "o": torch.optim.SGD(model.first.parameters())}, blocking=True)
        before = {k: v.clone() for k, v in model.state_dict().items()}
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1)
        moved = {k: v.clone() for k, v in model.state_dict().items()}
        other = torch.optim.SGD(model.last.parameters())
        with pytest.raises(ValueError, match=r"first\.weight"):
            ckpt.restore({"m": model, "o": other})
        two = torch.optim.SGD([{"params": model.first.weight}, {"params": model.first.bias}])
        with pytest.raises(ValueError, match="2 parameter groups, the checkpoint 1"):
            ckpt.restore({"m": model, "o": two})
        same_tree(dict(model.state_dict()), moved)
        assert ckpt.restore({"m": model}).step == 1
        same_tree(dict(model.state_dict()), before)


def test_state_is_cast_as_load_state_dict_does(tmp_path):
    model = Net(torch.bfloat16)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)
    train(model, optimizer, 0, dtype=torch.bfloat16)
    with dt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"model": model, "optimizer": optimizer}, blocking=True)
        reference = Net(torch.float32)
        wanted = torch.optim.AdamW([p for p in reference.parameters() if p.requires_grad])
        wanted.load_state_dict(optimizer.state_dict())
        again = Net(torch.float32)
        fresh = torch.optim.AdamW([p for p in again.parameters() if p.requires_grad])
        ckpt.restore({"model": again, "optimizer": fresh})
    same_tree(fresh.state_dict(), wanted.state_dict())
    assert fresh.state[again.first.weight]["exp_avg"].dtype is torch.float32
    assert fresh.state[again.first.weight]["step"].dtype is torch.float32


def test_two_models_with_the_same_names_in_one_optimizer(tmp_path):
    first, second = Matrices(), Matrices()
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()])
    train(first, optimizer, 0)
    train(second, optimizer, 0)
    with dt.Checkpointer(tmp_path) as ckpt:
        state = {"gen": first, "nested": {"disc": second}, "optimizer": optimizer}
        ckpt.save(1, state, blocking=True)
        a, b = Matrices(), Matrices()
        fresh = torch.optim.Adam([*b.parameters(), *a.parameters()])
        r = ckpt.restore({"gen": a, "nested": {"disc": b}, "optimizer": fresh})
    assert "nested/disc/a.weight" in r.state["optimizer"]["state"]
    same_tree(fresh.state[b.a.weight], optimizer.state[second.a.weight])
    same_tree(fresh.state[a.a.weight], optimizer.state[first.a.weight])


def test_grad_scaler_and_averaged_model(tmp_path):
    model = Net()
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with dt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"model": model, "ema": average, "scaler": scaler}, blocking=True)
        again = Net()
        fresh_average = torch.optim.swa_utils.AveragedModel(again)
        fresh_scaler = torch.amp.GradScaler("cpu")
        ckpt.restore({"model": again, "ema": fresh_average, "scaler": fresh_scaler})
    same_tree(dict(fresh_average.state_dict()), dict(average.state_dict()))
    assert fresh_scaler.state_dict() == scaler.state_dict()
