"""Runs contenders in fresh processes, rounds interleaved, one JSON line per (round, contender).

harness.py images|lidar|checkpoint|checkpoint2|many|compression --work DIR [--rounds 9]
           [--seconds 5] [--only REGEX] [--out FILE]
"""

import argparse
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import time

import checkpoint_timing
import compressing
import dataset
import loading
import psutil
import registry

import checkpoint  # noqa: F401 (registers its contenders)

CHECKPOINTS = {"checkpoint": 1, "checkpoint2": 2, "many": 1}  # ranks
TIMEOUT_S = 300
WARM_UNITS_S = 1.0


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=sorted(registry.CONTENDERS))
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--only", default=".*")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--child")
    return parser.parse_args()


def tree_cpu_s():
    """CPU seconds of this process and all it started."""
    total = 0.0
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        try:
            t = process.cpu_times()
            total += t.user + t.system + t.children_user + t.children_system
        except psutil.Error:
            pass
    return total


def machine_cpu_s():
    """Busy CPU seconds of the whole machine."""
    t = psutil.cpu_times()
    return t.user + t.nice + t.system + t.irq + t.softirq


def tree_pss_mib():
    """Proportional memory of this process and all it started."""
    me = psutil.Process()
    total = 0
    for process in [me, *me.children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            pass
    return total / (1 << 20)


def describe(batch):
    """Shape and mean of a batch's array, to see that contenders do the same work."""
    import numpy as np

    while isinstance(batch, (list, tuple)):
        batch = batch[0]
    array = np.asarray(batch)
    return {"shape": list(array.shape), "mean": round(float(array.mean(dtype=np.float64)), 4)}


def time_loading(args, make):
    """Epoch after epoch for the given seconds after a warm-up; units and CPU of that window."""
    root, plan = dataset.make(args.work)
    started = time.perf_counter()
    epoch = make(args.work, root, plan)
    units, first_s, about, window = 0, None, None, None
    pss_mib = 0.0
    while True:
        for batch, count in epoch():
            now = time.perf_counter()
            if first_s is None:
                first_s, about = now - started, describe(batch)
            if window is None:
                if now - started - first_s > WARM_UNITS_S:
                    window = (time.perf_counter(), tree_cpu_s(), machine_cpu_s())
                continue
            units += count
            if now - window[0] > args.seconds:
                wall_s = now - window[0]
                cpu_s = tree_cpu_s() - window[1]
                others = (machine_cpu_s() - window[2] - cpu_s) / wall_s
                pss_mib = tree_pss_mib()
                return {
                    "units_per_s": units / wall_s,
                    "cpu_ms_per_unit": cpu_s * 1e3 / units,
                    "first_batch_s": first_s,
                    "pss_mib": pss_mib,
                    "other_cpus": others,
                    "batch": about,
                }


def child(args):
    make = registry.CONTENDERS[args.workload][args.child]
    if args.workload == "compression":
        result = compressing.time_contender(args.work, make)
    elif args.workload in CHECKPOINTS:
        result = checkpoint_timing.time_contender(args.work, make)
    else:
        result = time_loading(args, make)
    print("RESULT " + json.dumps(result), flush=True)
    os._exit(0)  # workers of some contenders keep a process from ending


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def run_child(args, name):
    command = [sys.executable, __file__, args.workload, "--work", str(args.work)]
    command += ["--seconds", str(args.seconds), "--child", name]
    env = dict(os.environ, PYTHONWARNINGS="ignore", TOKENIZERS_PARALLELISM="false")
    ranks = CHECKPOINTS.get(args.workload, 1)
    env.update(WORLD_SIZE=str(ranks), MASTER_PORT=free_port())
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    started = [
        subprocess.Popen(command, env=dict(env, RANK=str(rank)), **pipes) for rank in range(ranks)
    ]
    try:
        out, err = started[0].communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        out, err = "", f"no result within {TIMEOUT_S} s"
    for process in started:
        try:
            os.killpg(process.pid, 9)
        except ProcessLookupError:
            pass
        err += process.communicate()[1] if process is not started[0] else ""
    found = re.search(r"^RESULT (.*)$", out, re.M)
    return json.loads(found.group(1)) if found else {"error": err.strip()[-500:]}


def main():
    args = arguments()
    args.work = args.work.resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.child:
        child(args)
    if args.workload == "compression":
        compressing.prepare(args.work)
    elif args.workload not in CHECKPOINTS:
        _, plan = dataset.make(args.work)
        loading.prepare(args.work, plan, args.workload)
    names = [n for n in registry.CONTENDERS[args.workload] if re.search(args.only, n)]
    out = open(args.out, "w") if args.out else sys.stdout
    for round_number in range(args.rounds):
        turn = round_number % len(names)
        for name in names[turn:] + names[:turn]:  # no contender always follows the same one
            row = {"round": round_number, "contender": name, "workload": args.workload}
            row.update(run_child(args, name))
            print(json.dumps(row), file=out, flush=True)
            if args.out:
                print(f"round {round_number + 1}/{args.rounds} {name}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
