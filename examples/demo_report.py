"""The report of the demo: every promise, with the numbers of the run itself."""

import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from demo_logs import Attempt, History, history, samples


@dataclass
class Facts:
    """What the demo did."""

    reference: Attempt
    attempts: list[Attempt]
    epochs: int
    #: The picture page, or None if it could not be made, and the key of its sample.
    page: Path | None
    page_key: str
    seconds: float
    seed: int


@dataclass
class Report:
    """Lines of the report, and whether every promise was kept."""

    lines: list[str] = field(default_factory=list)
    kept: bool = True

    def say(self, line: str = "") -> None:
        self.lines.append(line)

    def promise(self, good: bool, text: str) -> None:
        self.kept = self.kept and good
        self.say(f"- {'kept' if good else '**BROKEN**'}: {text}")


def write_report(path: Path, facts: Facts) -> int:
    """Writes and prints the report; returns the exit code."""
    report = Report()
    report.say(f"# Drivetrain demo (kill seed {facts.seed}, {facts.seconds:.0f} s)")
    chain = history(facts.attempts)
    report.say()
    report.say("## Promises")
    report.say()
    every_run_went_as_planned(report, facts)
    exactly_once(report, facts, chain)
    same_bits(report, facts)
    it_learns(report, facts)
    what = f"sample {facts.page_key} as a person sees it: {facts.page or 'drivetrain view failed'}"
    report.promise(facts.page is not None, what)
    kills(report, facts)
    speed(report, facts)
    text = "\n".join(report.lines) + "\n"
    path.write_text(text)
    print(text, flush=True)
    return 0 if report.kept else 1


def every_run_went_as_planned(report: Report, facts: Facts) -> None:
    planned = [attempt for attempt in facts.attempts if attempt.kill]
    killed = [a for a in planned if a.hit and not a.ended and a.exit_code]
    report.promise(
        facts.reference.ended and len(killed) == len(planned) and facts.attempts[-1].ended,
        f"{len(killed)} of {len(planned)} kills hit, and the job reached its end on "
        f"{facts.attempts[-1].world} rank",
    )


def exactly_once(report: Report, facts: Facts, chain: History) -> None:
    seen: dict[int, Counter] = {}
    for records in chain.surviving.values():
        counter = seen.setdefault(records[0]["epoch"], Counter())
        counter.update(samples(records))
    size = facts.reference.first("start").get("samples", 0)
    good = sorted(seen) == list(range(facts.epochs)) and all(
        len(counter) == size and set(counter.values()) == {1} for counter in seen.values()
    )
    report.promise(
        good,
        f"each of {size} samples was seen exactly once in each of {len(seen)} epochs of the "
        f"surviving history ({chain.total} samples computed in all, {chain.struck} of them struck "
        f"by resumes, {chain.replayed} replayed)",
    )


def same_bits(report: Report, facts: Facts) -> None:
    wanted = {
        (step, rank): (line["loss_bits"], line["params"], line["keys"])
        for rank in range(facts.reference.world)
        for step, line in ((line["step"], line) for line in facts.reference.of(rank, "step"))
    }
    compared, different = 0, []
    for attempt in facts.attempts:
        if attempt.world != facts.reference.world:
            continue
        for rank in range(attempt.world):
            for line in attempt.of(rank, "step"):
                compared += 1
                found = (line["loss_bits"], line["params"], line["keys"])
                if found != wanted.get((line["step"], rank)):
                    different.append(f"attempt {attempt.number} step {line['step']} rank {rank}")
    report.promise(
        compared > 0 and not different,
        f"loss, parameters and samples of all {compared} steps of killed and resumed two-rank runs "
        f"(each rank counted) are bit-identical to the undisturbed run{_list(different)}",
    )
    resumes = [a for a in facts.attempts if a.restored]
    restored_same = [
        a for a in resumes if a.first("start").get("params") == wanted[(a.restored, 0)][1]
    ]
    report.promise(
        len(restored_same) == len(resumes) and bool(resumes),
        f"{len(restored_same)} of {len(resumes)} restores, the one on one rank included, brought "
        "back the very bits of the parameters",
    )


def _list(items: list[str]) -> str:
    return f" (different: {', '.join(items[:5])})" if items else ""


def it_learns(report: Report, facts: Facts) -> None:
    loss = facts.attempts[-1].first("held_out")
    undisturbed = facts.reference.first("held_out")
    first = facts.reference.first("step").get("loss", 0.0)
    own = loss.get("own", 0.0)
    others = {
        what: loss.get(name, 0.0)
        for name, what in {
            "other_pictures": "pictures",
            "other_points": "points",
            "other": "pictures and points",
        }.items()
    }
    told = ", ".join(
        f"{value:.3f} ({100 * (value / own - 1):+.0f} %) with another sample's {what}"
        for what, value in others.items()
        if own
    )
    report.promise(
        own > 0 and all(value > own for value in others.values()),
        f"the model learns from what it sees: held-out loss {own:.3f}, but {told} (first training "
        f"step {first:.3f}; undisturbed run {undisturbed.get('own', 0):.3f})",
    )


def kills(report: Report, facts: Facts) -> None:
    report.say()
    report.say("## Kills")
    report.say()
    report.say("| start | ranks | went on from | reached | SIGKILL hit |")
    report.say("|---|---|---|---|---|")
    for attempt in facts.attempts:
        reached = max(attempt.steps, default=attempt.restored)
        skipped = attempt.first("start").get("skipped") or []
        origin = f"step {attempt.restored}" if attempt.restored else "nothing"
        if skipped:
            origin += " (skipped " + "; ".join(f"{step}: {why}" for step, why in skipped) + ")"
        hit = f"rank {attempt.kill.rank}: {attempt.hit}" if attempt.kill else "none"
        report.say(f"| {attempt.number} | {attempt.world} | {origin} | step {reached} | {hit} |")


def speed(report: Report, facts: Facts) -> None:
    reference = facts.reference
    report.say()
    report.say("## Speed")
    report.say()
    records = [line for rank in range(reference.world) for line in reference.of(rank, "step")]
    begun = min(reference.of(rank, "begin")[0]["time"] for rank in range(reference.world))
    took = max(line["time"] for line in records) - begun
    waited = statistics.mean(line["waited_ms"] for line in records)
    computed = statistics.mean(line["computed_ms"] for line in records)
    report.say(
        f"- {len(samples(records)) / took:.1f} samples/s on {reference.world} ranks (each sample: "
        "6 pictures, 3 sweeps, boxes)"
    )
    report.say(f"- a step waited {waited:.1f} ms for data and computed {computed:.1f} ms (means)")
    stopped = [
        line["stopped_ms"]
        for attempt in [reference, *facts.attempts]
        for rank in range(attempt.world)
        for line in attempt.of(rank, "staged")
    ]
    report.say(
        f"- {len(stopped)} saves stopped the trainer for {statistics.median(stopped):.1f} ms each "
        f"(median; longest {max(stopped):.1f} ms, the first of a run makes the staging slots)"
    )
    where_time_went(report, reference.first("stats").get("stats", {}))


def where_time_went(report: Report, stats: dict) -> None:
    seconds = stats.get("seconds", {})

    def told(name: str) -> str:
        return f"{seconds.get(name, 0.0):.1f} s"

    report.say(
        f"- where the loader's time went (undisturbed run, rank 0, {told('elapsed')}): the trainer "
        f"computed {told('consumer')} and waited for batches {told('deliver_wait')}; behind it "
        f"decoding took {told('decode')}, assembling {told('assemble')}, planning {told('plan')}, "
        f"reads {told('fetch')} (summed, many at once; some read was under way for "
        f"{told('reading')}); bottleneck: {stats.get('bottleneck')}"
    )
    counters = ", ".join(f"{name} {value}" for name, value in flat(stats.get("io", {})))
    report.say(f"- its reads: {counters}")
    memory = ", ".join(f"{name} {value}" for name, value in flat(stats.get("memory", {})))
    report.say(f"- its memory: {memory}")


def flat(values: dict, prefix: str = "") -> list[tuple[str, object]]:
    """Nested counters as dotted names, zeros left out."""
    found: list[tuple[str, object]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            found += flat(value, f"{prefix}{name}.")
        elif value not in (0, 0.0, None, "", False):
            found.append((prefix + name, round(value, 3) if isinstance(value, float) else value))
    return found
