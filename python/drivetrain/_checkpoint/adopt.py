"""Snapshots that killed processes of this run left in shared memory.

A save is staged before it is written, and shared memory outlives the process. If the parts of all
ranks that staged a step together are whole, they are committed and restored as any other step;
otherwise they are dropped, and the reason reported. Nothing half-staged or changed is ever used.

The ranks of now need not be as many as those of then: each process holds its own rank's part, and
takes what no rank of now has on its machine. Parts of another world are committed as that world's,
each process for those it holds, and any mesh restores what any other saved.
"""

import json
import logging
from dataclasses import dataclass, field
from typing import Any

from drivetrain import _native
from drivetrain._native import DrivetrainError

_log = logging.getLogger("drivetrain.checkpoint")

#: (step, number of the save call, session, ranks that saved together): equal on all of them.
Key = tuple[int, int, int, int]


@dataclass
class Adoption:
    """What became of the snapshots that were found."""

    step: int | None = None
    """The step that was committed from them."""
    skipped: list[tuple[int, str]] = field(default_factory=list)
    """Steps that could not be, newest first, each with its reason."""


@dataclass
class Meeting:
    """How the ranks of now tell each other what they hold."""

    native: _native.Checkpointer
    rank: int
    world_size: int
    serial: int
    """Number of this restore, equal on all ranks."""

    def tell(self, tag: str, own: dict[str, Any]) -> list[dict[str, Any]]:
        """What every rank says, in rank order."""
        text = json.dumps(own)
        if self.world_size > 1:
            return [json.loads(t) for t in self.native.agree(f"restore-{self.serial}-{tag}", text)]
        return [json.loads(text)]


def adopt(
    native: _native.Checkpointer, rank: int, world_size: int, serial: int, wanted: int | None
) -> Adoption:
    """Commits the newest snapshot that is whole, if it is newer than what is committed.

    Args:
        native: checkpointer of this rank.
        rank: of this process.
        world_size: ranks that meet.
        serial: number of this restore, equal on all ranks.
        wanted: only this step; others are left where they are.
    """
    meeting = Meeting(native, rank, world_size, serial)
    answers = meeting.tell("staged", _own(native, rank))
    done = Adoption()
    if any("error" in answer for answer in answers):
        return done  # the restore itself meets the same error and says so
    first = answers[0]
    strangers = any(key[3] != world_size for answer in answers for key in answer["good"])
    if strangers or any(answer["more"] for answer in answers):
        # all ranks have hold of their own now: what is left belongs to nobody
        answers = meeting.tell("elsewhere", _rows(native.left_elsewhere()))
    newest = first["newest"]
    whole = _whole(answers)
    if wanted is not None:
        if not any(key[0] == wanted and wanted not in first["steps"] for key in whole):
            return done
        whole = {key for key in whole if key[0] == wanted}
    for key in sorted(whole, reverse=True):
        if wanted is None and newest is not None and key[0] <= newest:
            continue
        if _commit(meeting, key, _as_now(answers, key), done):
            break
    reached = done.step if done.step is not None else newest
    done.skipped += _reasons(answers, whole, -1 if reached is None else reached)
    done.skipped.sort(reverse=True)
    native.drop_left()
    native.sweep_left()
    return done


def _own(native: _native.Checkpointer, rank: int) -> dict[str, Any]:
    """What this rank has; rank 0 also says what is committed."""
    try:
        own = _rows(native.left())
        own["more"] = native.more_left()
        if rank == 0:
            found = native.candidates()
            own["newest"] = next((step for step, reason in found if reason is None), None)
            own["steps"] = [step for step, _ in found]
    except DrivetrainError as error:
        return {"error": str(error)}
    return own


def _rows(left: "list[_native._LeftRow]") -> dict[str, Any]:
    return {
        "good": [found[:5] for found in left if found[5] is None],
        "bad": [[found[0], found[5]] for found in left if found[5] is not None],
    }


def _held(answers: list[dict[str, Any]]) -> dict[Key, set[int]]:
    """Which ranks' parts of each save there are."""
    held: dict[Key, set[int]] = {}
    for answer in answers:
        for *key, rank in answer["good"]:
            held.setdefault(tuple(key), set()).add(rank)
    return held


def _whole(answers: list[dict[str, Any]]) -> set[Key]:
    """Saves of which every part is there."""
    return {
        key
        for key, ranks in _held(answers).items()
        # ranks that had not met cannot tell whether they staged it together
        if ranks == set(range(key[3])) and (key[3] == 1 or key[2] != 0)
    }


def _as_now(answers: list[dict[str, Any]], key: Key) -> bool:
    """Whether every rank of now holds the part of the same rank of then, and no other."""
    held = [[row[4] for row in answer["good"] if tuple(row[:4]) == key] for answer in answers]
    return held == [[rank] for rank in range(len(answers))]


def _commit(meeting: Meeting, key: Key, as_now: bool, done: Adoption) -> bool:
    """Commits a save; the same answer on all ranks."""
    step, op, session, world = key
    error = ""
    try:
        if as_now:
            meeting.native.adopt(step, op).wait()
        else:
            meeting.native.adopt_parts(step, op, session)
    except DrivetrainError as caught:
        error = str(caught)
    if not as_now:
        # ranks without a part of it have not heard what became of it
        answers = meeting.tell(f"adopted-{step}-{op}", {"error": error})
        error = next((answer["error"] for answer in answers if answer["error"]), "")
    if error:
        reason = f"its staged snapshot could not be committed: {error}"
        _log.warning("step %d: %s", step, reason)
        done.skipped.append((step, reason))
        return False
    _log.info("step %d, staged by %d ranks that were killed, was committed", step, world)
    done.step = step
    return True


def _reasons(answers: list[dict[str, Any]], whole: set[Key], reached: int) -> list[tuple[int, str]]:
    """Why snapshots of steps after `reached` were not used."""
    reasons = []
    for number, answer in enumerate(answers):
        where = f"rank {number}: " if len(answers) > 1 else ""
        for step, why in answer["bad"]:
            reasons.append((step, f"{where}its staged snapshot is not usable: {why}"))
    for key, ranks in sorted(_held(answers).items()):
        if key in whole:
            continue
        lacking = ", ".join(str(rank) for rank in range(key[3]) if rank not in ranks)
        of = "" if key[3] == len(answers) else f" of {key[3]}"
        why = f"ranks {lacking}{of} have none" if lacking else "the ranks had not met yet"
        reasons.append((key[0], f"its staged snapshot is not whole: {why}"))
    reasons = [(step, why) for step, why in reasons if step > reached]
    for step, why in reasons:
        _log.warning("step %d: %s", step, why)
    return reasons
