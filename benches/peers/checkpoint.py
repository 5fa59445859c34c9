"""Contenders that save and load 2.17 GB of model and Adam state, and how they are timed.

A contender has `save(state, path)`, which returns None or a function that waits until the save is
over, and `load(path, state)`, which fills the live tensors.
"""

import os
import pathlib
import re
import shutil
import time

import registry
from registry import OURS, register

STATE_GIB = 2.0
BYTES_PER_ELEMENT = 14  # bf16 parameter, fp32 master copy, exp_avg, exp_avg_sq
FREE_LEFT_MIB = 700


# ---- the state ----------------------------------------------------------------------------------
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


def make_state(seed=11):
    """Flat name → tensor."""
    import torch

    base = torch.randn(1 << 22, generator=torch.Generator().manual_seed(seed))
    state = {}

    def values(shape, scale, shift):
        count = 1
        for extent in shape:
            count *= extent
        rolled = base.roll(shift % 97)
        return (rolled.repeat(-(-count // len(rolled)))[:count] * scale).reshape(shape)

    for i, (name, shape) in enumerate(shapes()):
        master = values(shape, 0.02 + 0.0003 * (i % 17), i)
        state[f"model.{name}"] = master.to(torch.bfloat16)
        state[f"optim.{name}.master"] = master
        state[f"optim.{name}.exp_avg"] = values(shape, 1e-4, i + 5)
        state[f"optim.{name}.exp_avg_sq"] = values(shape, 1e-4, i + 9) ** 2
        state[f"optim.{name}.step"] = torch.tensor(float(1000 + i))
    return state


# ---- contenders ---------------------------------------------------------------------------------
@register("checkpoint", "torch_save")
class TorchSave:
    def save(self, state, path):
        import torch

        os.makedirs(path)
        torch.save(state, f"{path}/state.pt")

    def load(self, path, state):
        import torch

        copy_into(state, torch.load(f"{path}/state.pt", mmap=True))


def copy_into(state, loaded):
    for name, tensor in state.items():
        tensor.copy_(loaded[name])


@register("checkpoint", "safetensors")
class Safetensors:
    def save(self, state, path):
        from safetensors.torch import save_file

        os.makedirs(path)
        save_file(state, f"{path}/state.safetensors")

    def load(self, path, state):
        from safetensors.torch import load_file

        copy_into(state, load_file(f"{path}/state.safetensors"))


@register("checkpoint", "dcp_save")
class Dcp:
    def writer(self, path):
        import torch.distributed.checkpoint as dcp

        return dcp.FileSystemWriter(path, single_file_per_rank=True, sync_files=True)

    def save(self, state, path):
        import torch.distributed.checkpoint as dcp

        dcp.save(state, storage_writer=self.writer(path))

    def load(self, path, state):
        import torch.distributed.checkpoint as dcp

        dcp.load(state, checkpoint_id=path)


@register("checkpoint", "dcp_async")
class DcpAsync(Dcp):
    def more(self):
        return {}

    def save(self, state, path):
        import torch.distributed.checkpoint as dcp

        future = dcp.async_save(state, storage_writer=self.writer(path), **self.more())
        return getattr(future, "upload_completion", future).result


@register("checkpoint", "dcp_async_kept_stager")
class DcpAsyncKept(DcpAsync):
    stager = None

    def more(self):
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        if self.stager is None:
            self.stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=False,
                    use_shared_memory=False,
                    use_async_staging=False,
                    use_non_blocking_copy=False,
                )
            )
        return {"async_stager": self.stager}


class Ours:
    blocking = False
    checkpointer = None

    def save(self, state, path):
        import drivetrain as dt

        if self.checkpointer is None:
            self.checkpointer = dt.Checkpointer(os.path.dirname(path), keep=None)
        step = int(re.search(r"(\d+)$", path).group(1))
        handle = self.checkpointer.save(step, {"state": state}, rng=False, blocking=self.blocking)
        return None if self.blocking else handle.wait

    def load(self, path, state):
        step = int(re.search(r"(\d+)$", path).group(1))
        self.checkpointer.restore({"state": state}, step=step)

    def folder(self, base, step):
        return f"{base}/step-{step:08d}"


@register("checkpoint", OURS)
class OursAsync(Ours):
    """Asynchronous save."""


@register("checkpoint", f"{OURS}_blocking")
class OursBlocking(Ours):
    """The caller waits for the commit."""

    blocking = True


# ---- timing -------------------------------------------------------------------------------------
def fill_memory(folder):
    """Fills free memory with clean page cache, as on a machine that has run for a while."""
    ballast = folder / "ballast.sparse"
    if not ballast.exists():
        with open(ballast, "wb") as file:
            file.truncate(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))

    def free_mib():
        text = pathlib.Path("/proc/meminfo").read_text()
        return int(re.search(r"MemFree:\s+(\d+)", text).group(1)) >> 10

    buffer = bytearray(8 << 20)
    with open(ballast, "rb", buffering=0) as file:
        while free_mib() > FREE_LEFT_MIB and file.readinto(buffer):
            pass


def files_below(path):
    return [p for p in pathlib.Path(path).rglob("*") if p.is_file()]


def sync_tree(path):
    for file in [*files_below(path), pathlib.Path(path)]:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def evict(path):
    for file in files_below(path):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def read_all(path):
    """Brings the files into the page cache, also for contenders that do not read through it."""
    buffer = bytearray(8 << 20)
    for file in files_below(path):
        with open(file, "rb", buffering=0) as handle:
            while handle.readinto(buffer):
                pass


def cpu_s():
    return sum(os.times()[:4])


def time_save(contender, state, path, folder):
    fill_memory(folder)
    cpu, start = cpu_s(), time.perf_counter()
    wait = contender.save(state, str(path))
    stopped = time.perf_counter()
    if wait:
        wait()
    folder_of = getattr(contender, "folder", lambda base, step: str(path))
    sync_tree(folder_of(path.parent, int(path.name)))
    durable = time.perf_counter()
    return stopped - start, durable - start, cpu_s() - cpu


def time_load(contender, state, path, folder, cold):
    folder_of = getattr(contender, "folder", lambda base, step: str(path))
    wanted = {name: tensor.reshape(-1)[:64].clone() for name, tensor in state.items()}
    for tensor in state.values():
        tensor.zero_()
    if cold:
        evict(folder_of(path.parent, int(path.name)))
    fill_memory(folder)
    if not cold:
        read_all(folder_of(path.parent, int(path.name)))
    cpu, start = cpu_s(), time.perf_counter()
    contender.load(str(path), state)
    wall = time.perf_counter() - start
    same = all(bool((state[n].reshape(-1)[:64] == w).all()) for n, w in wanted.items())
    if not same:
        raise ValueError(f"{type(contender).__name__} loaded other values than it saved")
    return wall, cpu_s() - cpu


def time_contender(work, make):
    """Two saves (the second is reported: staging memory is then in use) and two loads."""
    import torch

    torch.set_num_threads(2)
    one_rank_group()
    folder = work / "checkpoints"
    base = folder / make.__name__
    shutil.rmtree(base, ignore_errors=True)
    base.mkdir(parents=True)
    state, contender = make_state(), make()
    tiny = {"w": torch.zeros(8)}
    wait = contender.save(tiny, str(base / "0"))  # imports and set-up are not part of the figures
    if wait:
        wait()
    time_save(contender, state, base / "1", folder)
    stopped_s, durable_s, save_cpu_s = time_save(contender, state, base / "2", folder)
    cold_s, _ = time_load(contender, state, base / "2", folder, cold=True)
    warm_s, load_cpu_s = time_load(contender, state, base / "2", folder, cold=False)
    shutil.rmtree(base, ignore_errors=True)
    return {
        "stopped_s": stopped_s,
        "durable_s": durable_s,
        "save_cpu_s": save_cpu_s,
        "load_cold_s": cold_s,
        "load_warm_s": warm_s,
        "load_cpu_s": load_cpu_s,
    }


def one_rank_group():
    import torch.distributed as dist

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)


assert registry.CONTENDERS["checkpoint"]
