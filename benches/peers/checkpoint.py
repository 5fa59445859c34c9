"""Contenders that save and load a training state.

A contender has `save(state, path)`, which returns None or a function that waits until the save is
over, and `load(path, state)`, which fills the live tensors. `checkpoint` runs them on one rank,
`checkpoint2` on two, `many` compares 100,000 small tensors with one tensor of the same bytes.
"""

import ctypes
import mmap
import os
import re
import threading

import checkpoint_state
from checkpoint_state import local
from registry import OURS, register


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
        local(tensor).copy_(loaded[name])


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
@register("checkpoint2", "dcp_save")
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
@register("checkpoint2", "dcp_async")
class DcpAsync(Dcp):
    def more(self):
        return {}

    def save(self, state, path):
        import torch.distributed.checkpoint as dcp

        future = dcp.async_save(state, storage_writer=self.writer(path), **self.more())
        return getattr(future, "upload_completion", future).result


@register("checkpoint", "dcp_async_kept_stager")
@register("checkpoint2", "dcp_async_kept_stager")
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


@register("checkpoint", "orbax")
class Orbax:
    def arrays(self, state):
        import ml_dtypes
        import torch

        def array(t):
            if t.dtype == torch.bfloat16:
                return t.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
            return t.numpy()

        return {name.replace(".", "_"): array(t) for name, t in state.items()}

    def save(self, state, path):
        import orbax.checkpoint as ocp

        checkpointer = ocp.StandardCheckpointer()
        checkpointer.save(os.path.abspath(path), self.arrays(state))

        def wait():
            checkpointer.wait_until_finished()
            checkpointer.close()

        return wait

    def load(self, path, state):
        import numpy as np
        import orbax.checkpoint as ocp

        live = self.arrays(state)
        loaded = ocp.StandardCheckpointer().restore(os.path.abspath(path), live)
        for name, array in live.items():
            np.copyto(array, np.asarray(loaded[name]))


@register("checkpoint", "copy_only")
class CopyOnly:
    """Not a checkpoint: the least a save can stop the trainer for, two threads of memmove into
    memory that has been touched."""

    load = None

    def prepare(self, state, folder):
        self.memory = mmap.mmap(-1, checkpoint_state.size_bytes(state))
        self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.at = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        ctypes.memset(self.at, 1, len(self.memory))

    def save(self, state, path):
        os.makedirs(path)
        jobs, at = [], self.at
        for tensor in state.values():
            length = tensor.numel() * tensor.element_size()
            jobs.append((at, tensor.data_ptr(), length))
            at += length
        # equal bytes: the large ones are cut in the middle
        halves = [[], []]
        for to, source, length in jobs:
            half = length // 2
            halves[0].append((to, source, half))
            halves[1].append((to + half, source + half, length - half))

        def copy(parts):
            for part in parts:
                ctypes.memmove(*part)

        other = threading.Thread(target=copy, args=(halves[1],))
        other.start()
        copy(halves[0])
        other.join()


@register("checkpoint", "disk_limit")
class DiskLimit:
    """Not a checkpoint: fio's O_DIRECT line for the same bytes; `prepare` fails without fio."""

    fills = False

    def prepare(self, state, folder):
        self.size_bytes = checkpoint_state.size_bytes(state) >> 20 << 20

    def fio(self, path, mode):
        import subprocess

        more = ["--end_fsync=1", "--fallocate=posix"] if mode == "write" else []
        command = ["fio", "--name=d", f"--filename={path}/d.bin", f"--size={self.size_bytes}"]
        command += [f"--rw={mode}", "--bs=1M", "--ioengine=io_uring", "--direct=1", "--iodepth=16"]
        subprocess.run([*command, *more], check=True, capture_output=True)

    def save(self, state, path):
        os.makedirs(path)
        self.fio(path, "write")

    def load(self, path, state):
        self.fio(path, "read")


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
@register("checkpoint2", OURS)
class OursAsync(Ours):
    """Asynchronous save."""


@register("checkpoint", f"{OURS}_blocking")
@register("checkpoint2", f"{OURS}_blocking")
class OursBlocking(Ours):
    """The caller waits for the commit."""

    blocking = True


@register("many", OURS)
class OursMany(Ours):
    """100,000 tensors of 4 KiB."""

    make_state = staticmethod(checkpoint_state.many_tensors)


@register("many", "one_tensor")
class OursOne(Ours):
    """The same bytes in one tensor."""

    make_state = staticmethod(checkpoint_state.one_tensor)
