"""What registering memory with io_uring is worth: rounds with and without it, interleaved.

registered.py --work DIR [--rounds 9] [--out FILE]

Each run is a process of its own. It saves and restores 1 GiB around the page cache and loads the
LiDAR workload for some seconds; the ratios are formed inside the rounds.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

SAVED_BYTES = 1 << 30
LOAD_S = 3.0
TIMEOUT_S = 120
ENV = "DRIVETRAIN_IO_REGISTER"
FIGURES = ("save_s", "save_cpu_s", "restore_s", "restore_cpu_s", "load_units_per_s", "load_cpu_ms")


def timed(work):
    """Wall and CPU seconds of a call."""
    cpu, start = sum(os.times()[:4]), time.perf_counter()
    work()
    return time.perf_counter() - start, sum(os.times()[:4]) - cpu


def child(work):
    """One run; prints its figures as JSON."""
    import drivetrain as dt
    import numpy as np

    import checkpoint

    state = {"w": np.arange(SAVED_BYTES // 4, dtype=np.float32)}
    figures = {}
    with dt.Checkpointer(str(work / "registered"), keep=dt.Keep(last=1)) as ckpt:
        for step in (1, 2):  # the second has its slots, like every later one
            saved = timed(
                lambda step=step: ckpt.save(step, state, rng=False, overwrite=True).wait()
            )
        figures["save_s"], figures["save_cpu_s"] = saved
        ckpt.restore(state)
        checkpoint.evict(work / "registered")
        figures["restore_s"], figures["restore_cpu_s"] = timed(lambda: ckpt.restore(state))
        figures["save_io"] = ckpt.stats()["io"]
    figures.update(load(dt, work))
    print(json.dumps(figures))


def load(dt, work):
    """Units per second and CPU of the LiDAR workload."""
    import dataset
    import loading

    root, plan = dataset.make(work)
    epoch = loading.our_sweeps(work, root, plan)
    next(iter(epoch()))
    units, cpu, start = 0, sum(os.times()[:4]), time.perf_counter()
    while time.perf_counter() - start < LOAD_S:
        for _, count in epoch():
            units += count
    wall = time.perf_counter() - start
    cpu_ms = (sum(os.times()[:4]) - cpu) * 1e3
    return {"load_units_per_s": units / wall, "load_cpu_ms": cpu_ms / units}


def run(work, on):
    """A run in a fresh process."""
    command = [sys.executable, __file__, "--work", str(work), "--child"]
    env = dict(os.environ, **{ENV: "1" if on else "0"})
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--child", action="store_true")
    args = parser.parse_args()
    if args.child:
        return child(args.work)
    rounds = []
    for number in range(args.rounds):
        order = (True, False) if number % 2 else (False, True)
        rounds.append({("on" if on else "off"): run(args.work, on) for on in order})
    lines = [
        f"registered memory, {args.rounds} rounds: off over on (above 1: registering helps)",
        "",
    ]
    lines += ["| figure | off | on | median ratio (lowest..highest) |", "|---|---:|---:|---:|"]
    for name in FIGURES:
        off, on = ([r[key][name] for r in rounds] for key in ("off", "on"))
        ratios = [b / a if name.endswith("per_s") else a / b for a, b in zip(off, on, strict=True)]
        middle = statistics.median
        lines.append(
            f"| {name} | {middle(off):.4g} | {middle(on):.4g} | {middle(ratios):.2f} "
            f"({min(ratios):.2f}..{max(ratios):.2f}) |"
        )
    text = "\n".join(lines) + "\n"
    print(text)
    if args.out:
        args.out.write_text(text)
        raw = args.out.with_suffix(".jsonl")
        raw.write_text("".join(json.dumps(r) + "\n" for r in rounds))


if __name__ == "__main__":
    main()
