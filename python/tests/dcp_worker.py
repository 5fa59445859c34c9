"""One rank of the DCP tests: `dcp_worker.py SCENARIO RANK WORLD FOLDER PORT`. Not a test module."""

import json
import pathlib
import sys
import traceback
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from drivetrain.torch import StorageReader, StorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

warnings.simplefilter("ignore")

WHOLE = torch.arange(7 * 6, dtype=torch.float32).reshape(7, 6)


def save(state, folder, **options):
    return dcp.save(state, storage_writer=StorageWriter(folder), **options)


def load(state, folder, **options):
    dcp.load(state, storage_reader=StorageReader(folder), **options)
    return state


def placements(dims):
    every = [[Shard(0)], [Shard(1)], [Replicate()]]
    if dims == 1:
        return every
    return [a + b for a in every for b in every]


def meshes(world):
    found = [init_device_mesh("cpu", (world,))]
    if world == 4:
        found.append(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return found


def reshard(rank, world, folder):
    """Every placement saved once, loaded as every other."""
    cases = [(mesh, p) for mesh in meshes(world) for p in placements(mesh.ndim)]
    state = {f"t{i}": distribute_tensor(WHOLE + i, *case) for i, case in enumerate(cases)}
    state |= {"rows": distribute_tensor(torch.arange(3.0), cases[0][0], [Shard(0)])}
    state |= {"n": {"step": 5, "tags": ("a", 1)}}
    save(state, folder / "mesh")
    wrong = []
    for i in range(len(cases)):
        for j, (mesh, wanted) in enumerate(cases):
            target = distribute_tensor(torch.zeros_like(WHOLE), mesh, wanted)
            load({f"t{i}": target}, folder / "mesh")
            if not torch.equal(target.full_tensor(), WHOLE + i):
                wrong.append([i, j])
    small = distribute_tensor(torch.zeros(3), cases[0][0], [Shard(0)])
    load({"rows": small}, folder / "mesh")
    return {
        "wrong": wrong,
        "rows": small.full_tensor().tolist(),
        "cases": len(cases),
    }


def build(mesh=None, seed=0):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
    if mesh is not None:
        for layer in model:
            if list(layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(7)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def full(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def same_state(a, b):
    if isinstance(a, dict):
        return list(a) == list(b) and all(same_state(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same_state, a, b))
    if isinstance(a, torch.Tensor):
        return torch.equal(full(a), full(b))
    return a == b


def fsdp(rank, world, folder):
    """FSDP2 and HSDP states through get_state_dict and set_state_dict; replicas once."""
    answer = {}
    for name, mesh in zip(("fsdp", "hsdp"), meshes(world)):
        model, optimizer = build(mesh)
        weights, moments = get_state_dict(model, optimizer)
        save({"model": weights, "optim": moments}, folder / name)
        other, other_optimizer = build(mesh, seed=1)
        state = dict(zip(("model", "optim"), get_state_dict(other, other_optimizer)))
        load(state, folder / name)
        set_state_dict(
            other,
            other_optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )
        again = dict(zip(("model", "optim"), get_state_dict(other, other_optimizer)))
        answer[name] = same_state(again, {"model": weights, "optim": moments})
        numel = sum(p.numel() for p in model.parameters())
        answer[f"{name} numel"] = numel
    return answer


def ddp(rank, world, folder):
    """Replicated tensors are written once, and values by one rank."""
    model = torch.nn.Linear(64, 64)
    dist.broadcast(model.weight.data, 0)
    dist.broadcast(model.bias.data, 0)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    save({"model": wrapped.state_dict(), "epoch": 3}, folder / "ddp")
    target = {"model": {f"module.{k}": torch.zeros_like(v) for k, v in model.state_dict().items()}}
    target["epoch"] = 0
    load(target, folder / "ddp")
    return {
        "same": torch.equal(target["model"]["module.weight"], model.weight),
        "epoch": target["epoch"],
        "bytes": sum(p.numel() * 4 for p in model.parameters()),
    }


class FailsOnOne(DefaultSavePlanner):
    def resolve_data(self, write_item):
        if dist.get_rank() == 1:
            raise RuntimeError("no such tensor on rank 1")
        return super().resolve_data(write_item)


def faults(rank, world, folder):
    mesh = meshes(world)[0]
    state = {"t": distribute_tensor(WHOLE, mesh, [Shard(0)]), "n": 1}
    answer = {}
    try:
        save(state, folder / "bad", planner=FailsOnOne())
    except CheckpointException as error:
        answer["failed"] = str(error)
    answer["no manifest"] = not (folder / "bad/manifest.json").exists()
    save(state, folder / "bad")
    try:
        save(state, folder / "bad")
    except CheckpointException as error:
        answer["again"] = str(error)
    target = {"t": distribute_tensor(torch.zeros_like(WHOLE), mesh, [Shard(1)]), "n": 0}
    load(target, folder / "bad")
    answer["loaded"] = torch.equal(target["t"].full_tensor(), WHOLE) and target["n"] == 1
    return answer


def caching(rank, world, folder):
    """Plans from DCP's cache, then one rank's plan changes."""
    mesh = meshes(world)[0]
    right = []
    for step in range(4):
        state = {"t": distribute_tensor(WHOLE + step, mesh, [Shard(0)]), "n": step}
        if step == 3 and rank == 1:  # the other rank still takes its plan from the cache
            state["more"] = torch.full((2,), float(step))
        planner = DefaultSavePlanner(enable_plan_caching=True)
        save(state, folder / f"cache-{step}", planner=planner)
        target = {"t": distribute_tensor(torch.zeros_like(WHOLE), mesh, [Shard(1)]), "n": -1}
        load(target, folder / f"cache-{step}")
        right.append(torch.equal(target["t"].full_tensor(), WHOLE + step) and target["n"] == step)
    return {"right": right}


def subgroups(rank, world, folder):
    """Each half saves its own checkpoint in its own group."""
    groups = [dist.new_group([0]), dist.new_group(list(range(1, world)))]
    mine = 0 if rank == 0 else 1
    state = {"t": torch.full((3,), float(mine))}
    save(state, folder / f"group-{mine}", process_group=groups[mine])
    target = {"t": torch.zeros(3)}
    load(target, folder / f"group-{mine}", process_group=groups[mine])
    return {"right": bool((target["t"] == mine).all())}


def async_modes(rank, world, folder):
    from drivetrain.torch import Stager
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    mesh = meshes(world)[0]
    answer = {}
    for kind in (AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS):
        shared = kind == AsyncCheckpointerType.PROCESS
        stager = Stager(shared=shared)
        futures = []
        for step in range(3):
            state = {"t": distribute_tensor(WHOLE + step, mesh, [Shard(0)]), "n": step}
            writer = StorageWriter(folder / f"{kind.value}-{step}")
            futures.append(
                dcp.async_save(
                    state,
                    storage_writer=writer,
                    async_stager=stager,
                    async_checkpointer_type=kind,
                )
            )
            futures[-1].result()
        right = []
        for step in range(3):
            target = {"t": distribute_tensor(torch.zeros_like(WHOLE), mesh, [Shard(1)]), "n": -1}
            load(target, folder / f"{kind.value}-{step}")
            right.append(
                torch.equal(target["t"].full_tensor(), WHOLE + step) and target["n"] == step
            )
        answer[kind.value] = right
        stager.close()
    return answer


def uncoordinated(rank, world, folder):
    state = {"mine": torch.full((2,), float(rank)), "n": rank}
    save(state, folder / "alone", use_collectives=False)
    dist.barrier()
    target = {"mine": torch.zeros(2), "n": -1}
    load(target, folder / "alone")
    return {"right": bool((target["mine"] == rank).all()) and target["n"] == rank}


def sharding_specs(rows):
    """Ways to cut the rows of a ShardedTensor: evenly, in turns, and into uneven pieces."""
    from torch.distributed._shard.sharding_spec import (
        ChunkShardingSpec,
        EnumerableShardingSpec,
        ShardMetadata,
    )

    def pieces(*cuts):
        ends = [*cuts[1:], (rows, None)]
        return EnumerableShardingSpec(
            [
                ShardMetadata([start, 0], [end - start, 6], f"rank:{rank}/cpu")
                for (start, rank), (end, _) in zip(cuts, ends)
            ]
        )

    return [
        ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]),
        ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu", "rank:1/cpu", "rank:0/cpu"]),
        ChunkShardingSpec(1, ["rank:0/cpu", "rank:1/cpu"]),
        pieces((0, 0), (2, 1), (3, 0)),
        pieces((0, 1), (5, 0)),
    ]


def sharded_tensors(rank, world, folder):
    """The older ShardedTensor, under every spec as every other, and as plain tensors."""
    from torch.distributed._shard import sharded_tensor

    def fill(tensor, value):
        for shard in tensor.local_shards():
            offsets, sizes = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            part = tuple(slice(o, o + n) for o, n in zip(offsets, sizes))
            shard.tensor.copy_(value[part])
        return tensor

    def right(tensor, value):
        expected = fill(sharded_tensor.zeros(tensor.sharding_spec(), 7, 6), value)
        pairs = zip(tensor.local_shards(), expected.local_shards())
        return all(torch.equal(a.tensor, b.tensor) for a, b in pairs)

    specs = sharding_specs(7)
    state = {
        f"t{i}": fill(sharded_tensor.zeros(spec, 7, 6), WHOLE + i) for i, spec in enumerate(specs)
    }
    save(state, folder / "sharded")
    wrong = []
    for i in range(len(specs)):
        for j, spec in enumerate(specs):
            target = {f"t{i}": sharded_tensor.zeros(spec, 7, 6)}
            load(target, folder / "sharded")
            if not right(target[f"t{i}"], WHOLE + i):
                wrong.append([i, j])
        plain = {f"t{i}": torch.zeros(7, 6)}
        load(plain, folder / "sharded")
        if not torch.equal(plain[f"t{i}"], WHOLE + i):
            wrong.append([i, "plain"])
    return {"wrong": wrong}


def orders(rank, world, folder):
    """Ranks list their keys in other orders, and another rank than 0 coordinates."""
    state = {"a": torch.ones(2), "b": torch.full((3,), 2.0), "n": 4}
    if rank:
        state = dict(reversed(state.items()))
    save(state, folder / "orders")
    target = {name: torch.zeros_like(v) if name != "n" else 0 for name, v in state.items()}
    load(target, folder / "orders")
    dcp.save_state_dict(state, StorageWriter(folder / "led"), coordinator_rank=1)
    led = {"b": torch.zeros(3)}
    dcp.load_state_dict(led, StorageReader(folder / "led"), coordinator_rank=1)
    return {
        "same": all(same_state(target[name], state[name]) for name in state),
        "led": bool((led["b"] == 2).all()),
    }


def two_dims(rank, world, folder):
    """Tensor parallelism with FSDP2 over it: strided shards."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def make(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 6))
        whole = {name: value.clone() for name, value in model.state_dict().items()}
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        return model, whole

    model, whole = make(0)
    save({"model": model.state_dict()}, folder / "two-dims")
    other, _ = make(1)
    state = {"model": other.state_dict()}
    load(state, folder / "two-dims")
    plain = {"model": {name: torch.zeros_like(value) for name, value in whole.items()}}
    load(plain, folder / "two-dims")
    return {
        "sharded": all(torch.equal(full(v), whole[k]) for k, v in state["model"].items()),
        "plain": all(torch.equal(v, whole[k]) for k, v in plain["model"].items()),
    }


def load_errors(rank, world, folder):
    """One rank cannot read: all hear of it."""
    save({"w": torch.arange(5000.0)}, folder / "errors")
    dist.barrier()
    if rank == 0:
        (file,) = (folder / "errors").glob("a-*/rank-0000[01].safetensors")
        raw = bytearray(file.read_bytes())
        raw[-5] ^= 1
        file.write_bytes(raw)
    dist.barrier()
    names = {"w": torch.zeros(5000)} if rank == 1 else {}
    try:
        load(names, folder / "errors")
    except CheckpointException as error:
        return {"ranks": sorted(error.failures), "text": str(error)}
    return {}


SCENARIOS = {
    f.__name__: f
    for f in (
        reshard,
        fsdp,
        ddp,
        faults,
        caching,
        subgroups,
        uncoordinated,
        async_modes,
        sharded_tensors,
        orders,
        two_dims,
        load_errors,
    )
}


def main():
    names, rank, world, folder, port = sys.argv[1:]
    rank, world, folder = int(rank), int(world), pathlib.Path(folder)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    answers = {}
    for name in names.split(","):
        try:
            answers[name] = SCENARIOS[name](rank, world, folder)
        except BaseException:
            answers[name] = {"crash": traceback.format_exc()}
            break
    (folder / f"answers-{rank}.json").write_text(json.dumps(answers))
    if all("crash" not in answer for answer in answers.values()):
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
