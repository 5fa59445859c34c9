"""The states that checkpoint contenders save: a model with Adam, on one rank or on several."""

import os

STATE_GIB = float(os.environ.get("STATE_GIB", "2.0"))
BYTES_PER_ELEMENT = 14  # bf16 parameter, fp32 master copy, exp_avg, exp_avg_sq
MANY_TENSORS, MANY_BYTES = 100_000, 4096


def shapes():
    """(name, shape) of parameters as a BEV model has them, until the state has its size."""
    out = [
        ("bev.embed.weight", (4096, 4096)),
        ("head.decoder.weight", (4096, 2048)),
        ("neck.fpn.weight", (1024, 2304)),
    ]
    left = int(STATE_GIB * (1 << 30) / BYTES_PER_ELEMENT)
    left -= sum(a * b for _, (a, b) in out)
    block = 0
    while left > 0:
        width, prefix = (768, f"enc.{block}") if block % 3 else (1024, f"img.{block}")
        for name, shape in block_shapes(width):
            out.append((f"{prefix}.{name}", shape))
            count = 1
            for extent in shape:
                count *= extent
            left -= count
        block += 1
    return out


def block_shapes(d):
    yield from [("qkv.weight", (3 * d, d)), ("qkv.bias", (3 * d,))]
    yield from [("proj.weight", (d, d)), ("proj.bias", (d,))]
    yield from [("fc1.weight", (4 * d, d)), ("fc1.bias", (4 * d,))]
    yield from [("fc2.weight", (d, 4 * d)), ("fc2.bias", (d,))]
    yield from [(f"ln{i}.{n}", (d,)) for i in (1, 2) for n in ("weight", "bias")]
    yield from [("gamma", (d,)), ("conv.weight", (64, 64, 3, 3)), ("conv.bias", (64,))]
    yield ("scale", ())


def make_state(rank=0, world=1, seed=11):
    """Flat name → tensor; with several ranks the large ones are DTensors cut along their rows."""
    import torch

    mesh = mesh_of(world)
    base = torch.randn(1 << 22, generator=torch.Generator().manual_seed(seed))
    state = {}

    def values(shape, scale, shift):
        count = 1
        for extent in shape:
            count *= extent
        rolled = base.roll(shift % 97)
        return (rolled.repeat(-(-count // len(rolled)))[:count] * scale).reshape(shape)

    for i, (name, shape) in enumerate(shapes()):
        cut = world > 1 and bool(shape) and shape[0] >= 64 and shape[0] % world == 0
        shape = (shape[0] // world, *shape[1:]) if cut else shape
        shift = i + (rank if cut else 0)  # what is not cut is equal on all ranks
        master = values(shape, 0.02 + 0.0003 * (i % 17), shift)
        tensors = {
            f"model.{name}": master.to(torch.bfloat16),
            f"optim.{name}.master": master,
            f"optim.{name}.exp_avg": values(shape, 1e-4, shift + 5),
            f"optim.{name}.exp_avg_sq": values(shape, 1e-4, shift + 9) ** 2,
        }
        state.update(sharded(tensors, mesh) if cut else tensors)
        state[f"optim.{name}.step"] = torch.tensor(float(1000 + i))
    return state


def mesh_of(world):
    if world == 1:
        return None
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (world,))


def sharded(tensors, mesh):
    from torch.distributed.tensor import DTensor, Shard

    return {n: DTensor.from_local(t, mesh, [Shard(0)], run_check=False) for n, t in tensors.items()}


def local(tensor):
    """The part of a tensor that this rank holds."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def size_bytes(state):
    """Bytes of this rank's parts."""
    return sum(local(t).numel() * local(t).element_size() for t in state.values())


def many_tensors(rank=0, world=1):
    """100,000 tensors of 4 KiB."""
    import torch

    whole = one_tensor()["all"]
    return {f"layer.{i}.w": row.clone() for i, row in enumerate(torch.unbind(whole))}


def one_tensor(rank=0, world=1):
    """The same bytes as one tensor."""
    import torch

    generator = torch.Generator().manual_seed(5)
    return {"all": torch.randn(MANY_TENSORS, MANY_BYTES // 4, generator=generator)}
