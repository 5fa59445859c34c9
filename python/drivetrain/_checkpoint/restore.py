"""Restore as a meeting: every rank loads the same step, completely, or every rank gets an error.

For each candidate the ranks meet three times: after planning (nothing touched yet), after reading,
and after `load_state_dict`. A step that is damaged on one rank is left by all.
"""

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from drivetrain import _native
from drivetrain._checkpoint import meeting
from drivetrain._checkpoint.blocks import paused_collector
from drivetrain._checkpoint.renaming import Rename
from drivetrain._checkpoint.targets import Plan
from drivetrain._checkpoint.values import Restored, RestorePlan
from drivetrain._native import (
    CheckpointDamaged,
    Corrupt,
    DeadlineExceeded,
    DrivetrainError,
    NotFound,
    PeerFailed,
    StorageError,
)

#: Faults of a step: the next older one may be good. All others are faults of the call.
STEP_FAULTS = (Corrupt, NotFound, StorageError)
#: Committed steps named in an error.
STEPS_SHOWN_MAX = 20

#: Killed restores of one step after which it is stepped over.
CRASHES_MAX = 3

#: What a rank says it is at, for the error on the others when it does not come.
PHASES = {"plan": "planning", "read": "reading", "apply": "load_state_dict"}

Candidates = list[tuple[int, str | None]]


@dataclass
class Restore:
    """One call of `Checkpointer.restore`."""

    native: _native.Checkpointer
    uri: str
    rank: int
    world_size: int
    serial: int
    """Number of this call, equal on all ranks, so that meetings of two calls never mix."""
    allow_pickle: bool = False
    skipped: list[tuple[int, str]] = field(default_factory=list)
    touched: bool = False
    rename: Rename | None = None
    stage_ranks: tuple[int, ...] | None = None
    """The ranks that hold the names of this one; None: all ranks hold all names."""
    neighbours: frozenset[int] = frozenset()
    """Other ranks on this machine."""

    def run(self, targets: dict[str, Any], step: int | None, strict: bool, rng: bool) -> Restored:
        """Loads the newest step that is good on all ranks, or exactly `step`."""
        found = self._candidates(looped=step is None)
        if step is not None:
            found = [self._named(found, step)]
        elif not found:
            return Restored(step=None)
        for number, reason in found:
            plan = None if reason else self._attempt(number, targets, strict, rng)
            if plan is None:
                if reason:
                    self.skipped.append((number, reason))
                continue
            return Restored(
                number,
                self.skipped,
                plan.state,
                plan.mapped,
                plan.missing,
                plan.unexpected,
                plan.reshaped,
                plan.renamed,
            )
        raise self._damaged()

    def look(self, targets: dict[str, Any], step: int | None) -> RestorePlan:
        """What `run` would do on this rank; touches nothing and meets nobody."""
        found = [(number, reason) for number, reason in self.native.candidates()]
        if step is not None:
            found = [self._named(found, step)]
        elif not found:
            return RestorePlan(step=None)
        for number, reason in found:
            if reason is None:
                opened = self.native.open(number)
                plan = self._plan(opened, strict=False)
                plan.add_all(targets, False, self.rename)
                return plan.report()
            self.skipped.append((number, reason))
        raise self._damaged()

    def _candidates(self, looped: bool) -> Candidates:
        """Steps that any rank sees, newest first, with the reason if one cannot use it.

        With `looped`, steps whose restore was killed again and again are none.
        """
        own: dict[str, Any] = {"host": meeting.machine()}
        error = None
        try:
            own["ok"] = self._sound() if looped and self.rank == 0 else self.native.candidates()
        except DrivetrainError as caught:
            error, own["error"] = caught, str(caught)
        answers = [json.loads(text) for text in self._meet("candidates", json.dumps(own))]
        if error is not None:
            raise error
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise PeerFailed(f"rank {rank}: {answer['error']}")
        hosts = [answer["host"] for answer in answers]
        self.neighbours = frozenset(
            rank for rank, host in enumerate(hosts) if host == own["host"] and rank != self.rank
        )
        seen = [dict(map(tuple, answer["ok"])) for answer in answers]
        merged: dict[int, str | None] = {}
        for step in sorted({step for steps in seen for step in steps}, reverse=True):
            merged[step] = None
            for rank, steps in enumerate(seen):
                reason = steps.get(step, "does not see it")
                if reason is not None:
                    merged[step] = reason if self.world_size == 1 else f"rank {rank}: {reason}"
                    break
        return list(merged.items())

    def _sound(self) -> Candidates:
        crashes = dict(self.native.restore_crashes())
        return [
            (step, reason or _crash_loop(step, crashes.get(step, 0)))
            for step, reason in self.native.candidates()
        ]

    def _named(self, found: Candidates, step: int) -> tuple[int, str | None]:
        for number, reason in found:
            if number == step:
                return number, reason
        steps = ", ".join(str(number) for number, _ in found[:STEPS_SHOWN_MAX]) or "none"
        raise NotFound(f"step {step} of {self.uri} not found: committed steps are {steps}")

    def _attempt(self, step: int, targets: dict[str, Any], strict: bool, rng: bool) -> Plan | None:
        mark = self.native.restore_begins(step) if self.rank == 0 else None
        plan, waits = None, True
        try:
            plan = self._load(step, targets, strict, rng)
        except DeadlineExceeded:
            waits = False  # another rank died: that was a crash, the mark stays
            raise
        finally:
            if mark is not None and waits:
                with contextlib.suppress(DrivetrainError):
                    self.native.restore_ended(mark, step if plan is not None else None)
        return plan

    def _load(self, step: int, targets: dict[str, Any], strict: bool, rng: bool) -> Plan | None:
        plans: list[Plan] = []

        def prepare() -> str:
            opened = self.native.open(step)
            plan = self._plan(opened, strict)
            with paused_collector():
                plan.add_all(targets, rng, self.rename)
            plans.append(plan)
            return opened.attempt

        def read() -> None:
            self.touched = True
            with paused_collector():
                plans[0].read()

        def apply() -> None:
            with paused_collector():
                plans[0].apply()

        good = self._phase(step, "plan", prepare)
        good = good and self._phase(step, "read", read)
        good = good and self._phase(step, "apply", apply)
        return plans[0] if good else None

    def _plan(self, opened: _native.OpenStep, strict: bool) -> Plan:
        return Plan(
            opened,
            self.rank,
            self.world_size,
            self.allow_pickle,
            strict=strict,
            stage_ranks=self.stage_ranks,
            neighbours=self.neighbours,
        )

    def _phase(self, step: int, name: str, work: Callable[[], str | None]) -> bool:
        """Does one part on all ranks; False when the step is damaged for any of them."""
        status, error = {"ok": ""}, None
        self.native.doing(f"restoring step {step}: {PHASES[name]}")
        try:
            status["ok"] = work() or ""
        except Exception as caught:
            error = caught
            fault = name != "apply" and isinstance(caught, STEP_FAULTS)
            status = {"damaged" if fault else "error": str(caught)}
        finally:
            self.native.doing()
        answers = [json.loads(text) for text in self._meet(f"{step}-{name}", json.dumps(status))]
        if error is not None and "error" in status:
            self._note(error)
            raise error
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise self._note(PeerFailed(f"rank {rank}: {answer['error']}"))
        for rank, answer in enumerate(answers):
            if "damaged" in answer:
                reason = answer["damaged"]
                reason = reason if self.world_size == 1 else f"rank {rank}: {reason}"
                self.skipped.append((step, reason))
                return False
        if len({answer["ok"] for answer in answers}) > 1:
            self.skipped.append((step, "ranks see different attempts of it"))
            return False
        return True

    def _meet(self, tag: str, payload: str) -> list[str]:
        if self.world_size == 1:
            return [payload]
        return self.native.agree(f"restore-{self.serial}-{tag}", payload)

    def _note(self, error: Exception) -> Exception:
        if self.touched:
            error.add_note("The targets of this restore are partly overwritten.")
        return error

    def _damaged(self) -> CheckpointDamaged:
        reasons = "; ".join(f"step {step}: {reason}" for step, reason in self.skipped)
        text = f"no committed step of {self.uri} can be restored: {reasons}"
        if self.touched:
            text += "; the targets are partly overwritten, do not train on"
        return CheckpointDamaged(text)


def _crash_loop(step: int, crashes: int) -> str | None:
    if crashes < CRASHES_MAX:
        return None
    return (
        f"{crashes} processes were killed while they restored it; restore(step={step}) tries it "
        "all the same"
    )
