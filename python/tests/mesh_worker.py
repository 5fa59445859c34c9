"""One rank of a mesh test: `mesh_worker.py SCENARIO RANK WORLD FOLDER PORT`.

Not a test module itself. What a rank must hold is cut by hand with `torch.chunk` from the whole
tensors, never asked of the code under test.
"""

import json
import pathlib
import sys
import traceback

import drivetrain as dt
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

#: Uneven, empty on some ranks, of one dimension, of three.
SHAPES = {
    "a": (7, 6),
    "b": (9,),
    "c": (1, 5),
    "d": (8, 8),
    "e": (0, 3),
    "f": (2, 3, 4),
    "g": (40, 3),
}
DTYPES = {"a": "float32", "b": "bfloat16", "c": "int64", "d": "float32", "e": "int8"}


def whole():
    """The tensors, equal on all ranks."""
    generator = torch.Generator().manual_seed(3)
    made = {}
    for name, shape in SHAPES.items():
        dtype = getattr(torch, DTYPES.get(name, "float64"))
        made[name] = torch.randint(-99, 99, shape, generator=generator).to(dtype)
    return made


def zeros():
    return {name: torch.zeros_like(tensor) for name, tensor in whole().items()}


def spread(tensors, mesh, *placements):
    """As torch distributes them; a tensor that lacks the dimension is replicated."""
    made = {}
    for name, tensor in tensors.items():
        fitting = [Replicate() if getattr(p, "dim", 0) >= tensor.dim() else p for p in placements]
        made[name] = distribute_tensor(tensor, mesh, fitting, src_data_rank=None)
    return made


def flat(tensors, rank, world):
    """ZeRO partitions: even ranges of each flattened tensor, the last ranks short or empty."""
    made = {}
    for name, tensor in tensors.items():
        most = -(-tensor.numel() // world)
        start = min(most * rank, tensor.numel())
        part = tensor.flatten()[start : start + most].clone()
        made[name] = dt.Sharded.flat(part, tuple(tensor.shape), start)
    return made


def kinds(world, rank):
    """Ways to spread tensors over this many ranks."""
    line = init_device_mesh("cpu", (world,))
    made = {
        "replicated": lambda t: {n: x.clone() for n, x in t.items()},
        "fsdp": lambda t: spread(t, line, Shard(0)),
        "columns": lambda t: spread(t, line, Shard(1)),
        "flat": lambda t: flat(t, rank, world),
    }
    if world == 4:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        made |= {
            "hsdp": lambda t: spread(t, square, Replicate(), Shard(0)),
            "both": lambda t: spread(t, square, Shard(0), Shard(1)),
            "twice": lambda t: spread(t, square, Shard(0), Shard(0)),
            "strided": lambda t: spread(t, square, _StridedShard(0, split_factor=2), Shard(0)),
            # rows 0, 1, 4, 5 and 2, 3, 6, 7 of eight: two rectangles on each rank
            "stripes": lambda t: spread(t, square, _StridedShard(0, split_factor=2), Replicate()),
            "submesh": lambda t: spread(t, square["tp"], Shard(0)),
        }
    return made


def local_of(value):
    value = value.tensor if isinstance(value, dt.Sharded) else value
    return value.to_local() if hasattr(value, "to_local") else value


def save_all(rank, world, folder):
    """Saves every kind in one step, and restores each as every other."""
    made = {kind: make(whole()) for kind, make in kinds(world, rank).items()}
    with dt.Checkpointer(folder / "kinds", timeout="60s") as ckpt:
        ckpt.save(1, made, blocking=True)
    return {
        "kinds": sorted(made),
        "wrong": load_all(rank, world, folder, sorted(made)),
        "fsdp_tp": fsdp_tp_save(rank, folder),
        "ambiguous": ambiguous(rank, folder),
        "ddp": ddp_save(folder),
    }


def load_all(rank, world, folder, stored):
    wrong = []
    with dt.Checkpointer(folder / "kinds", timeout="60s") as ckpt:
        for name, make in kinds(world, rank).items():
            live, want = {kind: make(zeros()) for kind in stored}, make(whole())
            ckpt.restore(live, rng=False)
            wrong += [
                f"{kind} as {name}: {key}"
                for kind in stored
                for key in want
                if not torch.equal(local_of(live[kind][key]), local_of(want[key]))
            ]
    return wrong


def restore_all(rank, world, folder):
    """Restores on this number of ranks what four ranks saved."""
    stored = json.loads((folder / "save_all-4-0.json").read_text())["kinds"]
    return {
        "wrong": load_all(rank, world, folder, stored),
        "fsdp_tp": fsdp_load(world, folder),
        "meta": fsdp_load(world, folder, meta=True),
        "ddp as fsdp": fsdp_load(world, folder, "ddp"),
        "ddp as meta": fsdp_load(world, folder, "ddp", meta=True),
        "ddp": ddp_load(folder, "ddp"),
        "fsdp_tp as ddp": ddp_load(folder, "fsdp_tp"),
    }


class Net(torch.nn.Module):
    """7 rows on two times two ranks: 2, 2, 2 and 1."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(11)
        self.up = torch.nn.Linear(6, 7)
        self.down = torch.nn.Linear(7, 4)


def parallel_net():
    """FSDP2 over tensor parallelism, as a trainer builds it."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = Net()
    parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(net, mesh=mesh["dp"])
    return net


def by_hand(tensor, dims, rank):
    """The part of a rank: tensor parallelism cuts first, then FSDP along the first dimension."""
    if dims is not None:
        parts = tensor.chunk(2, dims)
        tensor = parts[rank % 2]
    parts = tensor.chunk(2, 0)
    return parts[rank // 2] if rank // 2 < len(parts) else tensor[:0]


def fsdp_tp_save(rank, folder):
    net, want = parallel_net(), Net()
    cut_by_tp = {"up.weight": 0, "up.bias": 0, "down.weight": 1, "down.bias": None}
    held = {name: p.to_local() for name, p in net.named_parameters()}
    hand = {n: by_hand(p.detach(), cut_by_tp[n], rank) for n, p in want.named_parameters()}
    optimizer = trained(net)
    with dt.Checkpointer(folder / "fsdp_tp", timeout="60s") as ckpt:
        ckpt.save(1, {"model": net, "optimizer": optimizer}, blocking=True)
        again = parallel_net()
        for parameter in again.parameters():
            parameter.to_local().detach().fill_(0)
        fresh = torch.optim.AdamW(again.parameters())
        ckpt.restore({"model": again, "optimizer": fresh})
    pairs = zip(net.parameters(), again.parameters())
    same = [
        torch.equal(p.to_local(), q.to_local())
        and torch.equal(
            optimizer.state[p]["exp_avg"].to_local(), fresh.state[q]["exp_avg"].to_local()
        )
        for p, q in pairs
    ]
    return {
        "held by hand": all(
            torch.allclose(held[n], hand[n], rtol=1e-3) and held[n].shape == hand[n].shape
            for n in hand
        ),
        "again": all(same),
        "strided": any("_S" in str(p.placements) for p in net.parameters()),
    }


def trained(net):
    """One step that changes little, and state that is known by its parameter; without a forward
    pass, which uneven sizes do not allow."""
    optimizer = torch.optim.AdamW(net.parameters())
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter in net.parameters():
        optimizer.state[parameter]["exp_avg"].copy_(parameter.detach() * 2)
    return optimizer


def ddp_save(folder):
    """DistributedDataParallel: every rank holds all, and it is written once."""
    net = torch.nn.parallel.DistributedDataParallel(Net())
    optimizer = trained(net)
    with dt.Checkpointer(folder / "ddp", timeout="60s") as ckpt:
        ckpt.save(1, {"model": net, "optimizer": optimizer}, blocking=True)
        opened = ckpt._native.open(1)
        paths = [json.loads(path) for path, _, _ in opened.tensors()]
        names = sorted(".".join(path[1:]) for path in paths if path[0] == "model")
    return {"names": names, "loaded": ddp_load(folder, "ddp")}


def ddp_load(folder, root):
    net = Net()
    for parameter in net.parameters():
        parameter.detach().fill_(0)
    net = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters())
    with dt.Checkpointer(folder / root, timeout="60s") as ckpt:
        ckpt.restore({"model": net, "optimizer": optimizer}, rng=False)
    named = dict(net.module.named_parameters())
    state = {name: optimizer.state[parameter]["exp_avg"] for name, parameter in named.items()}
    right = all(torch.allclose(named[n], p, rtol=1e-3) for n, p in Net().named_parameters())
    doubled = all(torch.equal(state[name], 2 * named[name].detach()) for name in named)
    return {"right": right, "doubled": doubled}


def fsdp_load(world, folder, root="fsdp_tp", meta=False):
    """FSDP2 over all ranks; with `meta` of a model that has no memory before it is restored."""
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta" if meta else "cpu"):
        net = Net()
    if not meta:
        for parameter in net.parameters():
            parameter.detach().fill_(0)
    fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(net.parameters())
    with dt.Checkpointer(folder / root, timeout="60s") as ckpt:
        ckpt.restore({"model": net, "optimizer": optimizer}, rng=False)
    assert all(parameter.device.type == "cpu" for parameter in net.parameters())
    full = {name: p.full_tensor().tolist() for name, p in net.named_parameters()}
    state = {n: optimizer.state[p]["exp_avg"].full_tensor() for n, p in net.named_parameters()}
    doubled = all((state[n] == 2 * torch.tensor(full[n])).all().item() for n in full)
    right = all(
        torch.allclose(torch.tensor(full[name]), parameter, rtol=1e-3)
        for name, parameter in Net().named_parameters()
    )
    return {"right": right, "doubled": doubled}


def ambiguous(rank, folder):
    """Twelve ranks would be needed to see it; the arithmetic alone must refuse it."""
    from drivetrain._checkpoint import spread as arithmetic

    return arithmetic.local_ranges(27, [(4, 3, 2), (1, 4, 2)], 1) is None


def main():
    scenario, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    folder, port = pathlib.Path(sys.argv[4]), sys.argv[5]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    try:
        answer = globals()[scenario](rank, world, folder)
        dist.barrier()
    except Exception:
        answer = {"crash": traceback.format_exc()}
    (folder / f"{scenario}-{world}-{rank}.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
