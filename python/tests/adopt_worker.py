"""One rank of a test of staged snapshots: `adopt_worker.py SCENARIO RANK WORLD FOLDER`.

Not a test module itself. A scenario returns what the test asserts on, written as JSON; those that
end with a SIGKILL write nothing.
"""

import os
import pathlib
import signal

import drivetrain as dt
import numpy as np
from ranks import answer_scenario

ROWS = 600


def checkpointer(folder, rank, world, **options):
    options = {"timeout": "20s", "shm_dir": folder / "shm", **options}
    return dt.Checkpointer(folder / "run", rank=rank, world_size=world, **options)


def state_of(step, rank, world):
    """A part of its own per rank, a replica, counters and a value per rank."""
    own = np.arange(ROWS * 512, dtype=np.float32).reshape(ROWS, 512) + step * 10 + rank
    return {
        "own": dt.Sharded(own, (ROWS * world, 512), (ROWS * rank, 0)),
        "same": {"a": np.full(3000, step, np.int32), "b": np.arange(7) * step},
        "rank": dt.PerRank({"rank": rank, "step": step}),
        "extra": {"step": step},
    }


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def one_then_killed_writing(rank, world, folder):
    """DRIVETRAIN_FAULT kills this process at the first operation of step 2."""
    ckpt = checkpointer(folder, rank, world)
    ckpt.save(1, state_of(1, rank, world), blocking=True)
    ckpt.save(2, state_of(2, rank, world)).wait()


def killed_when_staged(rank, world, folder):
    """The very first save, not even begun to be written."""
    ckpt = checkpointer(folder, rank, world)
    ckpt.save(2, state_of(2, rank, world)).staged()
    die()


def killed_while_staging(rank, world, folder):
    """Rank 0 dies between the last copy and the seal."""
    ckpt = checkpointer(folder, rank, world)
    ckpt.save(1, state_of(1, rank, world), blocking=True)
    if rank == 0:
        native = ckpt._native

        class Dying:
            def __getattr__(self, name):
                return getattr(native, name)

            def save(self, *args, check, **options):
                return native.save(*args, check=die, **options)

        ckpt._native = Dying()
    ckpt.save(2, state_of(2, rank, world)).staged()
    die()


def report(r, ckpt, rank, folder):
    """What a restore did, and what is there now."""
    return {
        "step": r.step,
        "adopted": r.adopted,
        "skipped": [[step, why] for step, why in r.skipped],
        "steps": ckpt.steps(),
        "slots": sorted(p.name for p in (folder / "shm").iterdir()) if rank == 0 else [],
    }


def restore(rank, world, folder):
    """What the next process finds; then trains on for one step and saves it."""
    want = {step: state_of(step, rank, world) for step in (1, 2)}
    target = state_of(0, rank, world)
    target["rank"] = dt.PerRank(None)
    ckpt = checkpointer(folder, rank, world)
    r = ckpt.restore(target)
    found = report(r, ckpt, rank, folder)
    if r.step is not None:
        expected = want[r.step]
        found["right"] = bool(
            (target["own"].tensor == expected["own"].tensor).all()
            and all((target["same"][k] == expected["same"][k]).all() for k in "ab")
            and target["rank"].value == {"rank": rank, "step": r.step}
            and target["extra"] == {"step": r.step}
        )
    ckpt.save(3, state_of(3, rank, world), blocking=True)
    again = ckpt.restore({"extra": {}}, strict=False, rng=False)
    found["goes on"] = [again.step, again.adopted, again.skipped]
    ckpt.close()
    return found


def restore_elsewhere(rank, world, folder):
    """As many processes as there are now restore what STAGED_BY had staged; then one more step."""
    old = int(os.environ["STAGED_BY"])
    rows = ROWS * old
    first, last = rows * rank // world, rows * (rank + 1) // world
    target = {
        "own": dt.Sharded(np.zeros((last - first, 512), np.float32), (rows, 512), (first, 0)),
        "same": {"a": np.zeros(3000, np.int32), "b": np.arange(7) * 0},
        "extra": {},
    }
    ckpt = checkpointer(folder, rank, world)
    r = ckpt.restore(target, strict=False)
    found = report(r, ckpt, rank, folder)
    states = [state_of(r.step, other, old) for other in range(old)]
    whole = np.concatenate([state["own"].tensor for state in states])
    found["right"] = bool(
        (target["own"].tensor == whole[first:last]).all()
        and all((target["same"][k] == states[0]["same"][k]).all() for k in "ab")
        and target["extra"] == {"step": r.step}
    )
    found["saved by"] = ckpt._native.open(r.step).world_size
    found["whole"] = ckpt.verify(r.step).ok
    ckpt.save(3, state_of(3, rank, world), blocking=True)
    again = ckpt.restore({"extra": {}}, strict=False, rng=False)
    found["goes on"] = [again.step, again.adopted, again.skipped]
    ckpt.close()
    return found


def three_saves(rank, world, folder):
    """Writes are slow on some rank, so the third save finds both slots busy there."""
    ckpt = checkpointer(folder, rank, world, on_busy="skip", keep=None)
    handles = [ckpt.save(step, state_of(step, rank, world)) for step in (1, 2, 3)]
    waited = [handle.wait() for handle in handles]
    ckpt.save(4, state_of(4, rank, world), blocking=True)
    found = {
        "waited": waited,
        "skipped": [handle.skipped for handle in handles],
        "shown": repr(handles[2]),
        "steps": ckpt.steps(),
        "stats": ckpt.stats()["skipped_saves"],
    }
    ckpt.close()
    return found


def many_saves(rank, world, folder):
    """Memory, descriptors and segments after the first saves and after the last."""
    ckpt = checkpointer(folder, rank, world, keep=dt.Keep(last=2))
    count = int(os.environ["SAVES"])
    marks = []
    for step in range(count):
        state = {"w": np.full(20_000, step, np.float32), "extra": {"note": "x" * (step % 50)}}
        ckpt.save(step, state)
        if step in (count // 5, count - 1):
            status = pathlib.Path("/proc/self/status").read_text().splitlines()
            fields = dict(line.split(":", 1) for line in status)
            marks.append(
                {
                    "rss_kib": int(fields["VmRSS"].split()[0]),
                    "descriptors": len(os.listdir("/proc/self/fd")),
                    "threads": int(fields["Threads"]),
                    "slots": len(os.listdir(folder / "shm")),
                    "maps": pathlib.Path("/proc/self/maps").read_text().count("drivetrain-"),
                }
            )
    ckpt.close()
    return {"marks": marks, "left": os.listdir(folder / "shm"), "steps": ckpt_steps(folder)}


def ckpt_steps(folder):
    with checkpointer(folder, 0, 1) as ckpt:
        return ckpt.steps()


if __name__ == "__main__":
    answer_scenario(globals())
