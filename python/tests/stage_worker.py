"""One rank of a pipeline test: `stage_worker.py SCENARIO RANK WORLD FOLDER PORT`.

Not a test module itself. A model of six layers lies on stages of two data-parallel ranks each (or
of one); every layer's parameters are arithmetic on its number, so each rank knows what it must get.
"""

import drivetrain as dt
import torch
from ranks import answer_scenario
from torch import nn

LAYERS = 6
WIDTH = 8


class Stage(nn.Module):
    """Layers by their number in the whole model; the last stage has the head, too."""

    def __init__(self, numbers):
        super().__init__()
        self.layers = nn.ModuleDict({str(n): nn.Linear(WIDTH, WIDTH) for n in numbers})
        if LAYERS - 1 in numbers:
            self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x


def stage_of(rank, stages, copies):
    """This rank's layers and the ranks that hold them, too."""
    number, per_stage = rank // copies, LAYERS // stages
    ranks = list(range(number * copies, (number + 1) * copies))
    return range(number * per_stage, (number + 1) * per_stage), ranks


def trained(numbers):
    """The same on all ranks of a stage: parameters by arithmetic, Adam after two steps."""
    model = Stage(numbers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            layer = int(name.split(".")[1])
            values = torch.arange(parameter.numel()).reshape(parameter.shape)
            parameter.copy_(values * 0.01 + layer + (0.5 if name.endswith("bias") else 0))
        if hasattr(model, "seen"):
            model.seen.fill_(7)
    adam = torch.optim.AdamW(model.parameters(), lr=0.25)
    for round_ in range(2):
        for name, parameter in model.named_parameters():
            parameter.grad = torch.full_like(parameter, int(name.split(".")[1]) + round_ + 1.0)
        adam.step()
    return model, adam


def fresh(numbers):
    model = Stage(numbers)
    return model, torch.optim.AdamW(model.parameters(), lr=9.0)


def same(numbers, model, adam):
    """Whether they are what `trained` gives, bit for bit."""
    expected, optimizer = trained(numbers)
    mine, theirs = model.state_dict(), expected.state_dict()
    equal = mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)
    a, b = adam.state_dict(), optimizer.state_dict()
    equal &= a["param_groups"] == b["param_groups"] and a["state"].keys() == b["state"].keys()
    slots = ("exp_avg", "exp_avg_sq", "step")
    return equal and all(
        torch.equal(a["state"][n][slot], b["state"][n][slot]) for n in a["state"] for slot in slots
    )


def save(rank, world, folder):
    numbers, ranks = stage_of(rank, 2, world // 2)
    model, adam = trained(numbers)
    with dt.Checkpointer(
        folder / "run", rank=rank, world_size=world, stage_ranks=ranks, timeout="60s"
    ) as ckpt:
        state = {"model": model, "optim": adam, "at": 5, f"note-{numbers[0]}": "own"}
        ckpt.save(1, state, blocking=True)
        return {"io": ckpt.stats()["io"]["written_bytes"]}


def restore(rank, world, folder):
    """Three stages of one rank each, or the whole model on one."""
    numbers, ranks = stage_of(rank, world, 1)
    model, adam = fresh(numbers)
    stage = None if world == 1 else ranks
    with dt.Checkpointer(
        folder / "run", rank=rank, world_size=world, stage_ranks=stage, timeout="60s"
    ) as ckpt:
        state = {"model": model, "optim": adam, "at": 0}
        found = ckpt.restore(state)
        return {
            "step": found.step,
            "same": same(numbers, model, adam),
            "at": state["at"],
            "unexpected": found.unexpected,
        }


def differ(rank, world, folder):
    """Stages that disagree about a value, and ranks of one stage that do."""
    numbers, ranks = stage_of(rank, 2, world // 2)
    model, _ = trained(numbers)
    errors = []
    with dt.Checkpointer(
        folder / "run", rank=rank, world_size=world, stage_ranks=ranks, timeout="60s"
    ) as ckpt:
        for state in (
            {"model": model, "at": rank // 2},
            {"model": model, "at": rank},
            {"model": {"shared": torch.ones(3)}},
        ):
            try:
                ckpt.save(1, state, blocking=True)
            except dt.DrivetrainError as error:
                errors.append(str(error))
        return {"errors": errors, "steps": ckpt.steps()}


if __name__ == "__main__":
    answer_scenario({"save": save, "restore": restore, "differ": differ})
