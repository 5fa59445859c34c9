"""Snapshots that killed processes of this run left in shared memory.

A save is staged before it is written, and shared memory outlives the process. If every rank's
staged snapshot of one step is whole, all ranks commit it and restore it as any other step;
otherwise it is dropped, and the reason reported. Nothing half-staged or changed is ever used.
"""

import json
import logging
from dataclasses import dataclass, field
from typing import Any

from drivetrain import _native
from drivetrain._native import DrivetrainError

_log = logging.getLogger("drivetrain.checkpoint")

#: (step, number of the save call, session): equal on all ranks that staged it together.
Key = tuple[int, int, int]


@dataclass
class Adoption:
    """What became of the snapshots that were found."""

    step: int | None = None
    """The step that was committed from them."""
    skipped: list[tuple[int, str]] = field(default_factory=list)
    """Steps that could not be, newest first, each with its reason."""


def adopt(
    native: _native.Checkpointer, rank: int, world_size: int, serial: int, wanted: int | None
) -> Adoption:
    """Commits the newest snapshot that all ranks have, if it is newer than what is committed.

    Args:
        native: checkpointer of this rank.
        rank: of this process.
        world_size: ranks that meet.
        serial: number of this restore, equal on all ranks.
        wanted: only this step; others are left where they are.
    """
    text = json.dumps(_own(native, rank))
    tag = f"restore-{serial}-staged"
    answers = [json.loads(t) for t in (native.agree(tag, text) if world_size > 1 else [text])]
    done = Adoption()
    if any("error" in answer for answer in answers):
        return done  # the restore itself meets the same error and says so
    newest = answers[0]["newest"]
    keys = [{tuple(key) for key in answer["good"]} for answer in answers]
    whole = set.intersection(*keys)
    if world_size > 1:
        # ranks that had not met cannot tell whether they staged it together
        whole = {key for key in whole if key[2] != 0}
    if wanted is not None:
        if not any(key[0] == wanted and wanted not in answers[0]["steps"] for key in whole):
            return done
        whole = {key for key in whole if key[0] == wanted}
    for key in sorted(whole, reverse=True):
        if wanted is None and newest is not None and key[0] <= newest:
            continue
        if _commit(native, key, done):
            break
    reached = done.step if done.step is not None else newest
    done.skipped += _reasons(answers, keys, whole, -1 if reached is None else reached)
    done.skipped.sort(reverse=True)
    native.drop_left()
    native.sweep_left()
    return done


def _own(native: _native.Checkpointer, rank: int) -> dict[str, Any]:
    """What this rank has; rank 0 also says what is committed."""
    try:
        left = native.left()
        own: dict[str, Any] = {
            "good": [found[:3] for found in left if found[3] is None],
            "bad": [[found[0], found[3]] for found in left if found[3] is not None],
        }
        if rank == 0:
            found = native.candidates()
            own["newest"] = next((step for step, reason in found if reason is None), None)
            own["steps"] = [step for step, _ in found]
    except DrivetrainError as error:
        return {"error": str(error)}
    return own


def _commit(native: _native.Checkpointer, key: Key, done: Adoption) -> bool:
    try:
        native.adopt(key[0], key[1]).wait()
    except DrivetrainError as error:
        reason = f"its staged snapshot could not be committed: {error}"
        _log.warning("step %d: %s", key[0], reason)
        done.skipped.append((key[0], reason))
        return False
    _log.info("step %d, staged by a process that was killed, was committed", key[0])
    done.step = key[0]
    return True


def _reasons(
    answers: list[dict[str, Any]], keys: list[set[Key]], whole: set[Key], reached: int
) -> list[tuple[int, str]]:
    """Why snapshots of steps after `reached` were not used."""
    reasons = []
    for number, answer in enumerate(answers):
        where = f"rank {number}: " if len(answers) > 1 else ""
        for step, why in answer["bad"]:
            reasons.append((step, f"{where}its staged snapshot is not usable: {why}"))
    for key in sorted(set.union(*keys) - whole):
        lacking = ", ".join(str(n) for n, own in enumerate(keys) if key not in own)
        why = f"ranks {lacking} have none" if lacking else "the ranks had not met yet"
        reasons.append((key[0], f"its staged snapshot is not whole: {why}"))
    reasons = [(step, why) for step, why in reasons if step > reached]
    for step, why in reasons:
        _log.warning("step %d: %s", step, why)
    return reasons
