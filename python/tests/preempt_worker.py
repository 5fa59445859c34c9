"""One rank of a preemption test: `preempt_worker.py SCENARIO RANK WORLD FOLDER`.

Not a test module itself. Says READY when the handlers are there; what it found is written as JSON.
"""

import json
import pathlib
import signal
import sys
import time

import drivetrain as dt
import numpy as np

#: Steps before a scenario gives up: the test ends it long before.
STEPS_MAX = 6000


def loop(rank, world, folder):
    """A training loop that stops when the ranks agree, and saves once more."""
    chained = []
    signal.signal(signal.SIGTERM, lambda number, frame: chained.append(number))
    weight = np.zeros(1000)
    with dt.Checkpointer(folder / "run", rank=rank, world_size=world, timeout="60s") as ckpt:
        preemption = ckpt.preemption()
        print("READY", flush=True)
        for step in range(STEPS_MAX):
            weight += 1
            time.sleep(0.002 * (rank + 1))  # ranks drift
            if ckpt.should_stop:
                ckpt.save(step, {"w": weight}).wait()
                break
        received = preemption.received
    return {"step": step, "received": received, "chained": chained}


def deaf(rank, world, folder):
    """A loop that never looks: what was staged is flushed and the process ends."""
    with dt.Checkpointer(folder / "run", rank=rank, world_size=world, timeout="60s") as ckpt:
        ckpt.preemption(grace="300ms")
        ckpt.save(7, {"w": np.arange(1000)})
        print("READY", flush=True)
        while True:
            time.sleep(60)


def main():
    scenario, rank, world, folder = sys.argv[1:5]
    folder = pathlib.Path(folder)
    answer = globals()[scenario](int(rank), int(world), folder)
    (folder / f"{scenario}-{rank}.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
