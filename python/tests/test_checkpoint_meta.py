"""Modules without memory (`torch.device("meta")`) get it from a restore, and little more."""

import subprocess
import sys

import drivetrain as dt
import pytest
import torch
from drivetrain import _native
from torch import nn

torch.set_num_threads(1)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)


@pytest.fixture
def ckpt(tmp_path):
    with dt.Checkpointer(tmp_path / "run") as made:
        yield made


def test_a_meta_model_is_filled_and_stays_tied(ckpt):
    torch.manual_seed(5)
    model = Tied()
    model.norm.running_mean.fill_(3)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    ckpt.save(1, {"model": model, "optimizer": optimizer}, blocking=True)

    with torch.device("meta"):
        empty = Tied()
    before = torch.optim.AdamW(empty.parameters())  # made before there is memory
    weight = empty.embed.weight
    r = ckpt.restore({"optimizer": before, "model": empty})
    assert r.missing == [] and empty.embed.weight is weight
    assert empty.head.weight is empty.embed.weight
    for (name, got), want in zip(empty.state_dict().items(), model.state_dict().values()):
        assert got.device.type == "cpu" and torch.equal(got, want), name
    assert not empty.frozen.requires_grad and weight.requires_grad
    want = optimizer.state[model.embed.weight]["exp_avg"]
    assert torch.equal(before.state[weight]["exp_avg"], want)
    empty.head(empty.embed(torch.tensor([1, 2]))).sum().backward()
    before.step()


def test_meta_tensors_of_another_dtype_are_cast(ckpt):
    ckpt.save(1, {"model": nn.Linear(3, 2)}, blocking=True)
    with torch.device("meta"):
        half = nn.Linear(3, 2, dtype=torch.bfloat16)
    ckpt.restore({"model": half})
    assert half.weight.dtype is torch.bfloat16 and half.weight.device.type == "cpu"


def test_meta_tensors_outside_modules_are_refused_with_advice(ckpt):
    ckpt.save(1, {"v": {"w": torch.ones(2)}}, blocking=True)
    with pytest.raises(_native.Unsupported, match=r"v\.w.*meta.*to_empty"):
        ckpt.restore({"v": {"w": torch.empty(2, device="meta")}})


PEAK = """
import resource, sys
import drivetrain as dt, torch
from torch import nn

def net():
    return nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(24)))

def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

ckpt = dt.Checkpointer(sys.argv[1])
if sys.argv[2] == "save":
    ckpt.save(1, {"model": net()}, blocking=True)
else:
    with torch.device("meta"):
        model = net()
    before = peak_mib()
    ckpt.restore({"model": model})
    own = sum(p.numel() * 4 for p in model.parameters()) / 2**20
    assert own == 384 and all(p.device.type == "cpu" for p in model.parameters())
    print(peak_mib() - before - own)
ckpt.close()
"""


def test_a_restore_takes_little_more_memory_than_the_model(tmp_path):
    """A peak of two copies (384 MiB more) would fail."""

    def run(what):
        child = subprocess.run(
            [sys.executable, "-c", PEAK, str(tmp_path), what], capture_output=True, text=True
        )
        assert child.returncode == 0, child.stderr
        return child.stdout

    run("save")
    assert float(run("load")) <= 256
