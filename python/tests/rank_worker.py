"""One rank of a multi-process checkpoint test: `rank_worker.py SCENARIO RANK WORLD FOLDER [PORT]`.

Not a test module itself. A scenario returns what the test asserts on, written as JSON.
"""

import sys

import drivetrain as dt
import numpy as np
from drivetrain import _native
from ranks import answer_scenario

WHOLE = np.arange(7 * 3, dtype=np.float32).reshape(7, 3)


def rows(rank, world):
    """First and last row of a rank's part of WHOLE, as even as they come."""
    return len(WHOLE) * rank // world, len(WHOLE) * (rank + 1) // world


def part(rank, world, source=WHOLE):
    first, last = rows(rank, world)
    return dt.Sharded(source[first:last].copy(), WHOLE.shape, (first, 0))


def restore_numpy(rank, world, folder):
    """Restores what `torch_two_ranks` saved, on any number of ranks, without torch."""
    target = part(rank, world, np.zeros_like(WHOLE))
    own = dt.PerRank(None)
    with dt.Checkpointer(folder / "run", rank=rank, world_size=world, timeout="60s") as ckpt:
        r = ckpt.restore({"sharded": target, "own": own, "extra": {}}, step=1, rng=False)
    first, last = rows(rank, world)
    return {
        "step": r.step,
        "mapped": {str(k): v for k, v in r.per_rank_mapped.items()},
        "own": own.value,
        "extra": r.state["extra"],
        "right": bool((target.tensor == WHOLE[first:last]).all()),
    }


def missing_rank(rank, world, folder):
    with dt.Checkpointer(folder / "run", rank=rank, world_size=world, timeout="2s") as ckpt:
        try:
            ckpt.save(1, {"n": 1}, blocking=True)
        except _native.DrivetrainError as error:
            return {"kind": type(error).__name__, "text": str(error), "steps": ckpt.steps()}
    return {}


def large_save(rank, world, folder):
    """20 MB per rank; the fault that keeps one of them from writing comes from outside."""
    own = np.full((5_000_000,), rank, np.float32)
    state = {"w": dt.Sharded(own, (5_000_000 * world,), (5_000_000 * rank,))}
    with dt.Checkpointer(folder / "run", rank=rank, world_size=world, timeout="15s") as ckpt:
        try:
            ckpt.save(1, state, blocking=True)
        except _native.DrivetrainError as error:
            return {"kind": type(error).__name__, "text": str(error), "steps": ckpt.steps()}
    return {}


def torch_two_ranks(rank, world, folder):
    """Everything that needs a process group, in one start of torch."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    port = int(sys.argv[5])
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    ckpt = dt.Checkpointer(folder / "run", timeout="60s")
    found = {"ranks": [ckpt.rank, ckpt.world_size]}
    for scenario in (
        save_and_restore,
        fully_sharded,
        differing_state,
        one_rank_refuses,
        damage_on_one_rank,
    ):
        found[scenario.__name__] = scenario(ckpt, rank, world, folder, torch)
        dist.barrier()
    ckpt.close()
    dist.barrier()
    dist.destroy_process_group()
    return found


def make_model(torch, rank):
    torch.manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
    )
    model[1].running_mean.fill_(rank)
    ddp = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    return ddp, torch.optim.AdamW(ddp.parameters(), lr=0.1)


def step_of(torch, ddp, optimizer, rank, seed):
    optimizer.zero_grad()
    batch = torch.randn(8, 3, generator=torch.Generator().manual_seed(seed * 10 + rank))
    loss = ddp(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def sharded_tensor(torch, fill=None):
    """A DTensor of 5 uneven rows over both ranks, and one replicated."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(10.0).reshape(5, 2) if fill is None else torch.full((5, 2), fill)
    return {
        "shard": distribute_tensor(whole, mesh, [Shard(0)]),
        "copy": distribute_tensor(whole, mesh, [Replicate()]),
        "columns": distribute_tensor(whole, mesh, [Shard(1)]),
        "short": distribute_tensor(whole[:1], mesh, [Shard(0)]),
    }


def save_and_restore(ckpt, rank, world, folder, torch):
    ddp, optimizer = make_model(torch, rank)
    step_of(torch, ddp, optimizer, rank, 0)
    state = {
        "model": ddp,
        "optimizer": optimizer,
        "sharded": part(rank, world),
        "dtensor": sharded_tensor(torch),
        "own": dt.PerRank({"rank": rank, "noise": [rank] * 3}),
        "extra": {"n": 3},
    }
    handle = ckpt.save(1, state)
    own_draw = torch.rand(1, generator=None).item()
    assert handle.wait("60s") == 1
    ahead = [step_of(torch, ddp, optimizer, rank, seed) for seed in (1, 2)]
    expected_mean = ddp.module[1].running_mean.tolist()

    again, fresh = make_model(torch, rank + 5)
    dtensors = sharded_tensor(torch, fill=-1.0)
    target = {
        "model": again,
        "optimizer": fresh,
        "sharded": part(rank, world, np.zeros_like(WHOLE)),
        "dtensor": dtensors,
        "own": dt.PerRank(None),
        "extra": {},
    }
    r = ckpt.restore(target)
    draw_again = torch.rand(1).item()
    want = sharded_tensor(torch)
    return {
        "step": r.step,
        "own": r.state["own"],
        "mean after restore": again.module[1].running_mean.mean().item(),
        "continues": [step_of(torch, again, fresh, rank, seed) for seed in (1, 2)] == ahead,
        "rank 0's buffers": rank != 0 or again.module[1].running_mean.tolist() == expected_mean,
        "rng": draw_again == own_draw,
        "sharded": bool((target["sharded"].tensor == part(rank, world).tensor).all()),
        "dtensor": all(torch.equal(dtensors[k].to_local(), want[k].to_local()) for k in want),
        "mapped": r.per_rank_mapped == {},
    }


def fully_sharded(ckpt, rank, world, folder, torch):
    """FSDP2: sharded parameters, and optimizer state that a fresh optimizer does not have yet."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world,))

    def make(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 3))
        for part in (*model, model):
            fully_shard(part, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = make(1)
    step_of(torch, model, optimizer, rank, 0)
    again, fresh = make(2)
    with dt.Checkpointer(folder / "fsdp", timeout="60s") as own:
        own.save(1, {"model": model, "optimizer": optimizer}, blocking=True)
        whole = {name: p.full_tensor().tolist() for name, p in model.named_parameters()}
        ahead = [step_of(torch, model, optimizer, rank, seed) for seed in (1, 2)]
        own.restore({"model": again, "optimizer": fresh})
    return {
        "continues": [step_of(torch, again, fresh, rank, seed) for seed in (1, 2)] == ahead,
        "whole": whole,
    }


def differing_state(ckpt, rank, world, folder, torch):
    try:
        ckpt.save(2, {"same": {"a": 1}, "extra": {"deep": [0, rank]}}, blocking=True)
    except _native.InvalidArgument as error:
        return {"text": str(error), "steps": ckpt.steps()}
    return {}


def one_rank_refuses(ckpt, rank, world, folder, torch):
    import time

    start = time.monotonic()
    try:
        ckpt.save(2, {"extra": {"bad": (lambda: 0) if rank == 1 else 1}}, blocking=True)
    except _native.DrivetrainError as error:
        soon = time.monotonic() - start < 30
        return {"kind": type(error).__name__, "text": str(error), "soon": soon}
    return {}


def damage_on_one_rank(ckpt, rank, world, folder, torch):
    """Rank 1's half of step 2 loses a bit: both ranks load step 1, completely."""
    weights = np.full((64, 64), rank + 10.0, np.float32)
    two = {"w": dt.Sharded(weights, (128, 64), (64 * rank, 0)), "n": 2}
    one = {"w": dt.Sharded(weights - 10, (128, 64), (64 * rank, 0)), "n": 1}
    ckpt.save(11, one, blocking=True)
    ckpt.save(12, two, blocking=True)
    torch.distributed.barrier()
    if rank == 0:
        (file,) = (folder / "run" / "step-00000012").glob("*/rank-00001.safetensors")
        data = bytearray(file.read_bytes())
        at = data.find(np.float32(11.0).tobytes() * 8)
        data[at + 2] ^= 1
        file.write_bytes(data)
    torch.distributed.barrier()
    live = np.zeros((64, 64), np.float32)
    counters = {"n": 0}
    target = {"w": dt.Sharded(live, (128, 64), (64 * rank, 0)), "n": 0}
    r = ckpt.restore(target)
    try:
        ckpt.restore({"w": dt.Sharded(live * 0, (128, 64), (64 * rank, 0))}, step=12)
        named = ""
    except _native.CheckpointDamaged as error:
        named = str(error)
    return {
        "step": r.step,
        "skipped": [[step, reason] for step, reason in r.skipped],
        "right": bool((live == rank).all()) and target["n"] == 1 and counters == {"n": 0},
        "named": named,
    }


if __name__ == "__main__":
    answer_scenario(globals())
