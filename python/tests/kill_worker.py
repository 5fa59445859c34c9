"""One rank that is killed: `kill_worker.py run|resume RANK URI OPTIONS SEED`.

Not a test module itself. `run` saves steps until it ends or is killed, and prints what it knows;
`resume` restores, checks every element and saves one more step.
"""

import json
import sys

import drivetrain as dt
import numpy as np
from drivetrain import _native

WORLD = 2
STEPS = 12
SHAPE = (64, 700)
# Longer than a start on a busy machine, short enough for a test.
PATIENCE = "12s"


def whole(step: int, seed: int) -> np.ndarray:
    """The tensor of a step: known to whoever knows step and seed."""
    rng = np.random.default_rng([seed, step])
    return rng.standard_normal(SHAPE, dtype=np.float32)


def part(rank: int, tensor: np.ndarray) -> dt.Sharded:
    first, last = SHAPE[0] * rank // WORLD, SHAPE[0] * (rank + 1) // WORLD
    return dt.Sharded(tensor[first:last].copy(), SHAPE, (first, 0))


def state(rank: int, step: int, seed: int) -> dict:
    both = whole(step, seed + 1)[0]
    return {"w": part(rank, whole(step, seed)), "both": both, "step": step}


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def checkpointer(rank: int, uri: str, options: dict) -> dt.Checkpointer:
    return dt.Checkpointer(
        uri,
        rank=rank,
        world_size=WORLD,
        timeout=PATIENCE,
        keep=dt.Keep(last=2),
        run_id="kills",  # staged snapshots of an object store are adopted only by the named run
        storage_options=options or None,
    )


def run(rank: int, uri: str, options: dict, seed: int) -> None:
    """Saves steps, every second one in the background, and every fourth one twice."""
    with checkpointer(rank, uri, options) as ckpt:
        say(ready=True)
        pending = None
        for step in range(1, STEPS + 1):
            handle = ckpt.save(step, state(rank, step, seed), blocking=bool(step % 2), rng=False)
            if pending is not None:
                say(committed=pending.wait())
            pending = handle
            if step % 4 == 0:
                say(committed=pending.wait())
                again = ckpt.save(step, state(rank, step, seed), overwrite=True, rng=False)
                pending = again
        say(committed=pending.wait())


def resume(rank: int, uri: str, options: dict, seed: int) -> None:
    with checkpointer(rank, uri, options) as ckpt:
        target = {
            "w": part(rank, np.zeros(SHAPE, np.float32)),
            "both": np.zeros(SHAPE[1], np.float32),
            "step": 0,
        }
        r = ckpt.restore(target, rng=False)
        step = r.step or 0
        right = step == 0 or (
            target["step"] == step
            and np.array_equal(target["w"].tensor, part(rank, whole(step, seed)).tensor)
            and np.array_equal(target["both"], whole(step, seed + 1)[0])
        )
        say(step=step, right=bool(right), skipped=[list(s) for s in r.skipped])
        ckpt.save(step + 1, state(rank, step + 1, seed), blocking=True, rng=False, overwrite=True)
        say(committed=step + 1, steps=ckpt.steps(), ok=ckpt.verify(step + 1).ok)


def main() -> None:
    verb, rank, uri, options, seed = sys.argv[1:]
    try:
        {"run": run, "resume": resume}[verb](int(rank), uri, json.loads(options), int(seed))
    except _native.DrivetrainError as error:
        say(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
