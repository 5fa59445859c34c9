"""Reads what the training job and its stores wrote down while they were killed."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Attempt:
    """One start of the training job, as its logs tell it."""

    number: int
    world: int
    kill: Any
    #: Events of each rank, in order.
    events: list[list[dict[str, Any]]]
    #: What the kill hit, in words; empty without a kill.
    hit: str = ""
    seconds: float = 0.0
    exit_code: int | None = None

    def of(self, rank: int, event: str) -> list[dict[str, Any]]:
        """A rank's events of one kind."""
        return [line for line in self.events[rank] if line["event"] == event]

    def first(self, event: str) -> dict[str, Any]:
        """Rank 0's first event of a kind, or an empty dict."""
        return next(iter(self.of(0, event)), {})

    @property
    def restored(self) -> int:
        """The step it went on from; 0 for none."""
        return self.first("start").get("restored") or 0

    @property
    def steps(self) -> dict[int, list[dict[str, Any]]]:
        """Finished steps: number to the records of the ranks that finished it."""
        found: dict[int, list[dict[str, Any]]] = {}
        for rank in range(self.world):
            for line in self.of(rank, "step"):
                found.setdefault(line["step"], []).append(line)
        return found

    @property
    def ended(self) -> bool:
        """Every rank reached the end."""
        return all(self.of(rank, "end") for rank in range(self.world))

    def describe(self) -> str:
        """A line for the person who waits."""
        last = max(self.steps, default=self.restored)
        told = f"from step {self.restored} to {last}, {self.seconds:.0f} s"
        return f"{told}; killed: {self.hit}" if self.hit else told


@dataclass
class History:
    """What survives of a chain of attempts: a resume strikes the steps after the restored one."""

    surviving: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    struck: int = 0
    replayed: int = 0
    total: int = 0


def samples(records: list[dict[str, Any]]) -> list[str]:
    """Keys that count: padding does not."""
    return [key for line in records for key, valid in zip(line["keys"], line["valid"]) if valid]


def history(attempts: list[Attempt]) -> History:
    """Follows the chain."""
    told = History()
    reached = 0
    for attempt in attempts:
        for step in [step for step in told.surviving if step > attempt.restored]:
            told.struck += len(samples(told.surviving.pop(step)))
        for step, records in attempt.steps.items():
            count = len(samples(records))
            told.total += count
            if step <= reached:
                told.replayed += count
            told.surviving[step] = records
        reached = max(reached, *attempt.steps, attempt.restored)
    return told


def lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a JSON-lines file."""
    if not path.is_file():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def tail(path: Path) -> Callable[[], Iterator[dict[str, Any]]]:
    """A function that yields the lines added since its last call."""
    offset = 0

    def added() -> Iterator[dict[str, Any]]:
        nonlocal offset
        if not path.is_file():
            return
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
        end = data.rfind(b"\n") + 1
        offset += end
        for line in data[:end].splitlines():
            yield json.loads(line)

    return added


def read_attempt(logs: Path, number: int, world: int, kill: Any) -> Attempt:
    """Reads an attempt's logs; `kill` is the plan for it."""
    events = [lines(logs / f"attempt-{number:02}-rank-{rank}.jsonl") for rank in range(world)]
    attempt = Attempt(number, world, kill, events)
    if kill is not None:
        operations = lines(logs / f"operations-{number:02}-rank-{kill.rank}.jsonl")
        attempt.hit = what_was_hit(events[kill.rank], operations)
    return attempt


def what_was_hit(events: list[dict[str, Any]], operations: list[dict[str, Any]]) -> str:
    """Says in words where a rank was when it died, from its last lines."""
    last = events[-1] if events else {"event": "nothing"}
    if any(line["event"] == "end" for line in events):
        return ""
    storage = operation_in_words(operations)
    if operations and operations[-1]["stage"] == "kill":
        return storage
    doing = {
        "begin": "inside step {step}",
        "save": "staging of step {step}",
        "step": "after step {step}",
        "staged": "between steps, after staging step {step}",
    }.get(last["event"], last["event"]).format(step=last.get("step"))
    return f"{doing}, while {storage}" if storage else doing


def operation_in_words(operations: list[dict[str, Any]]) -> str:
    """The operation a process died at: the killed one, or one that began and did not end."""
    ended = {line["n"] for line in operations if line["stage"] in ("after", "failed")}
    open_ones = [line for line in operations if line["n"] not in ended]
    killed = [line for line in operations if line["stage"] == "kill"]
    if not killed and not open_ones:
        return ""
    line = (killed or open_ones)[-1]
    name = line["path"].rsplit("/", 1)[-1]
    step = line["path"].split("/", 1)[0]
    done = "after" if line["n"] in ended else "before"
    if name == "manifest.json":
        return f"{done} the manifest of {step} was created"
    if name == "tensors.arrow":
        return f"{done} {line['op']} of tensors.arrow of {step}"
    if name.endswith(".safetensors"):
        return f"{done} {line['op']} of data file {name} of {step}"
    return f"{done} {line['op']} of {line['path']}"
