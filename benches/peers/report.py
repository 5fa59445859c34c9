"""Turns a run's JSON lines into a table: medians, and ratios formed inside the rounds.

report.py RESULTS.jsonl
"""

import collections
import json
import random
import statistics
import sys

import compressing
from registry import OURS

RESAMPLES = 10_000
NOISY_CPUS = 0.3
# figure → (heading, unit, True if more is better)
FIGURES = {
    "units_per_s": ("units/s", "", True),
    "cpu_ms_per_unit": ("CPU ms per unit", "ms", False),
    "first_batch_s": ("first batch", "s", False),
    "pss_mib": ("memory (PSS)", "MiB", False),
    "stopped_s": ("trainer stopped", "s", False),
    "durable_s": ("durable", "s", False),
    "save_cpu_s": ("CPU of a save", "s", False),
    "load_cold_s": ("load, cold", "s", False),
    "load_warm_s": ("load, warm", "s", False),
    "load_cpu_s": ("CPU of a load", "s", False),
    "save_extra_mib": ("extra memory, save", "MiB", False),
    "load_extra_mib": ("extra memory, load", "MiB", False),
}
for _name in compressing.FILES:
    FIGURES[f"{_name}_share"] = (f"{_name}: stored share", "", False)
    FIGURES[f"{_name}_encode_gb_s"] = (f"{_name}: encode, GB per CPU s", "GB/s", True)
    FIGURES[f"{_name}_decode_gb_s"] = (f"{_name}: decode, GB per CPU s", "GB/s", True)


def interval(ratios):
    """Bootstrap 90 % interval of the median; the resampling is seeded."""
    generator = random.Random(1)
    medians = sorted(
        statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES)
    )
    return medians[int(0.05 * RESAMPLES)], medians[int(0.95 * RESAMPLES) - 1]


def ratios_of(rounds, figure, peer, ours, more_is_better):
    """Peer over ours (or ours over peer where more is better), one per round that has both."""
    out = []
    for row in rounds.values():
        if figure in row.get(peer, {}) and figure in row.get(ours, {}):
            a, b = row[peer][figure], row[ours][figure]
            if a <= 0 or b <= 0:
                continue
            out.append(b / a if more_is_better else a / b)
    return out


def main():
    rows = [json.loads(line) for line in open(sys.argv[1])]
    rounds = collections.defaultdict(dict)
    for row in rows:
        rounds[row["round"]][row["contender"]] = row
    names = list(dict.fromkeys(row["contender"] for row in rows))
    figures = [f for f in FIGURES if any(f in row for row in rows)]
    ours_names = [n for n in names if n.startswith(OURS)]
    others = [row["other_cpus"] for row in rows if "other_cpus" in row]
    noisy = sum(cpus > NOISY_CPUS for cpus in others)
    disturbed = f", {noisy} of {len(others)} runs disturbed" if others else ""
    print(f"{rows[0]['workload']}: {len(rounds)} rounds{disturbed}\n")
    print("| contender | " + " | ".join(FIGURES[f][0] for f in figures) + " |")
    print("|---|" + "---:|" * len(figures))
    for name in names:
        cells = []
        for figure in figures:
            values = [r[name][figure] for r in rounds.values() if figure in r.get(name, {})]
            failed = any("error" in r.get(name, {}) for r in rounds.values())
            nothing = "failed" if failed else "-"
            cells.append(f"{statistics.median(values):.4g}" if values else nothing)
        print(f"| {name} | " + " | ".join(cells) + " |")
    for ours in ours_names:
        print(f"\nTimes better `{ours}` is, formed inside the rounds (median, 90 % interval):\n")
        print("| than | " + " | ".join(FIGURES[f][0] for f in figures) + " |")
        print("|---|" + "---:|" * len(figures))
        for name in names:
            if name in ours_names:
                continue
            cells = []
            for figure in figures:
                ratios = ratios_of(rounds, figure, name, ours, FIGURES[figure][2])
                if not ratios:
                    cells.append("")
                    continue
                low, high = interval(ratios)
                cells.append(f"{statistics.median(ratios):.2f} ({low:.2f}..{high:.2f})")
            print(f"| {name} | " + " | ".join(cells) + " |")
    failed = {row["contender"]: row["error"] for row in rows if "error" in row}
    for name, error in failed.items():
        print(f"\n{name} failed: {error[-200:]}")


main()
