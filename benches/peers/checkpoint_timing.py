"""How a checkpoint contender is timed: stopped, durable, CPU, extra memory, cold and warm loads."""

import os
import pathlib
import re
import shutil
import threading
import time

import checkpoint_state
from checkpoint_state import local

FREE_LEFT_MIB = 700
SAMPLE_S = 0.005


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


class ExtraMemory:
    """Highest resident memory of this process above what it had, in MiB, sampled."""

    def __enter__(self):
        self.before, self.peak, self.over = self.resident(), 0.0, threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()

    def watch(self):
        while not self.over.wait(SAMPLE_S):
            self.peak = max(self.peak, self.resident() - self.before)

    @staticmethod
    def resident():
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


class Ranks:
    """This process among those that run the contender together; figures are the slowest rank's."""

    def __init__(self):
        import torch.distributed as dist

        self.rank = int(os.environ.get("RANK", "0"))
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        store = dist.HashStore()
        if self.world > 1:
            port = int(os.environ["MASTER_PORT"])
            store = dist.TCPStore("127.0.0.1", port, self.world, self.rank == 0)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world)

    def barrier(self):
        import torch.distributed as dist

        if self.world > 1:
            dist.barrier()

    def all(self, figures, added=()):
        """The largest value over the ranks of each figure, the sum for those in `added`."""
        import torch.distributed as dist

        rows = [figures]
        if self.world > 1:
            rows = [None] * self.world
            dist.all_gather_object(rows, figures)
        return {k: (sum if k in added else max)(row[k] for row in rows) for k in figures}


def folder_of(contender, path):
    """Where the contender puts the step of that path."""
    place = getattr(contender, "folder", lambda base, step: str(path))
    return place(path.parent, int(path.name))


def time_save(ranks, contender, state, path, folder):
    if ranks.rank == 0:
        fill_memory(folder)
    ranks.barrier()
    with ExtraMemory() as memory:
        cpu, start = cpu_s(), time.perf_counter()
        wait = contender.save(state, str(path))
        stopped = time.perf_counter()
        if wait:
            wait()
        ranks.barrier()
        if ranks.rank == 0:
            sync_tree(folder_of(contender, path))
        ranks.barrier()
        durable = time.perf_counter()
    return {
        "stopped_s": stopped - start,
        "durable_s": durable - start,
        "save_cpu_s": cpu_s() - cpu,
        "save_extra_mib": memory.peak,
    }


def time_load(ranks, contender, state, path, folder, cold):
    wanted = {name: local(t).reshape(-1)[:64].clone() for name, t in state.items()}
    for tensor in state.values():
        local(tensor).zero_()
    if ranks.rank == 0:
        if cold:
            evict(folder_of(contender, path))
        fill_memory(folder)
        if not cold:
            read_all(folder_of(contender, path))
    ranks.barrier()
    with ExtraMemory() as memory:
        cpu, start = cpu_s(), time.perf_counter()
        contender.load(str(path), state)
        ranks.barrier()
        wall = time.perf_counter() - start
    for name, want in wanted.items() if getattr(contender, "fills", True) else ():
        if not bool((local(state[name]).reshape(-1)[:64] == want).all()):
            raise ValueError(
                f"{type(contender).__name__} loaded other values than it saved: {name}"
            )
    return wall, cpu_s() - cpu, memory.peak


def time_contender(work, make):
    """Two saves (the second is reported: staging memory is then in use) and two loads."""
    import torch

    ranks = Ranks()
    torch.set_num_threads(max(1, 2 // ranks.world))
    folder = work / "checkpoints"
    base = folder / make.__name__
    if ranks.rank == 0:
        shutil.rmtree(base, ignore_errors=True)
        base.mkdir(parents=True)
    ranks.barrier()
    make_state = getattr(make, "make_state", None) or checkpoint_state.make_state
    state, contender = make_state(ranks.rank, ranks.world), make()
    if hasattr(contender, "prepare"):
        contender.prepare(state, str(folder))
    else:  # imports and set-up are not part of the figures
        wait = contender.save({"w": torch.zeros(8)}, str(base / "0"))
        if wait:
            wait()
    ranks.barrier()
    time_save(ranks, contender, state, base / "1", folder)
    figures = time_save(ranks, contender, state, base / "2", folder)
    if ranks.rank == 0:
        shutil.rmtree(folder_of(contender, base / "1"), ignore_errors=True)
    if getattr(contender, "load", None):
        path = base / "2"
        cold_s, _, cold_mib = time_load(ranks, contender, state, path, folder, cold=True)
        warm_s, cpu, warm_mib = time_load(ranks, contender, state, path, folder, cold=False)
        loads = {"load_cold_s": cold_s, "load_warm_s": warm_s, "load_cpu_s": cpu}
        figures.update(loads, load_extra_mib=max(cold_mib, warm_mib))
    figures = ranks.all(figures, added=("save_cpu_s", "load_cpu_s"))
    if ranks.rank == 0:
        shutil.rmtree(base, ignore_errors=True)
    ranks.barrier()
    return figures
