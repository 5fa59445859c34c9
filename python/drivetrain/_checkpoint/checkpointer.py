"""`Checkpointer`: saves and restores all that training is, as one commit per step."""

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from drivetrain import _native
from drivetrain._checkpoint import meeting
from drivetrain._checkpoint.adopt import Adoption, adopt
from drivetrain._checkpoint.at_exit import close_at_exit
from drivetrain._checkpoint.blocks import Block, paused_collector
from drivetrain._checkpoint.delta import packing
from drivetrain._checkpoint.durations import seconds
from drivetrain._checkpoint.guard import Collected, Guard, check_mode
from drivetrain._checkpoint.handle import WAIT_SLICE_S, SaveHandle
from drivetrain._checkpoint.overlap import Overlap
from drivetrain._checkpoint.preempt import Preemption
from drivetrain._checkpoint.renaming import Rename
from drivetrain._checkpoint.restore import Restore
from drivetrain._checkpoint.rng import rng_state
from drivetrain._checkpoint.stages import checked_stage
from drivetrain._checkpoint.tree import Snapshot
from drivetrain._checkpoint.typed_json import Path, dotted
from drivetrain._checkpoint.values import (
    Keep,
    Problem,
    Restored,
    RestorePlan,
    Verified,
    check_budget_ms,
    check_choice,
    check_recopies,
    check_step,
    checked_metrics,
    warn_over_budget,
)

#: Failures of a save that training may survive with on_error="warn"; the rest are mistakes in the
#: call and always raise.
SOFT_FAILURES = (
    _native.StorageError,
    _native.DeadlineExceeded,
    _native.PeerFailed,
    _native.Corrupt,
)


class Checkpointer:
    """Commits checkpoints to a folder or object store and restores the newest good one.

    A step exists when its manifest exists, and the manifest is written last: a process killed at
    any point leaves the old steps and either no new one or a whole one.

    Args:
        uri: folder or object store URI; created if missing. One that cannot be written is
            refused, unless it holds steps to restore: then the first save says why.
        keep: which committed steps stay.
        rank: of this process; with `world_size`. Default: torch.distributed if it is initialised,
            else RANK and WORLD_SIZE, else 0 and 1.
        world_size: ranks that save together.
        on_error: "raise" raises a failed asynchronous save at `wait`, or at the next `save` or
            `close`; "warn" warns instead there, counts it in `failed_saves`, and training goes on.
        timeout: how long ranks wait for each other, seconds or text such as "10min".
        guard: "version", "checksum" or None: how tensors that change during the copy are noticed.
            Version counters do not see writes through `.data` or numpy views; checksums do and cost
            about two more copies.
        staging: "staged" copies everything before `save` returns. "overlapped" returns sooner: only
            what is no parameter or optimizer state of a module and optimizer given to `save` is
            copied at once, the rest while the next forward and backward pass run; a hook before
            `Optimizer.step` waits for the copy. Do not change parameters in other ways meanwhile:
            the guard refuses the save if you do.
        allow_pickle: store values of other types as pickles, and load such values. Pickles run
            code: only for checkpoints you trust.
        on_busy: what a save does when the bytes of two earlier ones are still being written: "wait"
            for a free staging slot; "skip" this save on all ranks, which `handle.skipped` tells;
            "warn" waits, and warns when the trainer was stopped longer than `stall_budget_ms`.
        stall_budget_ms: how long "skip" waits first (default: not at all), and from when "warn"
            warns.
        stage_ranks: the ranks that hold the same names as this one, itself included: those of its
            pipeline stage, or of its group of experts, such as
            ``torch.distributed.get_process_group_ranks(data_parallel_group)``. Ranks of other
            stages may then save other names; the checkpoint has all of them, and any number of
            stages restores it, each its own names. A name that two stages have must have equal
            values, and only one of them may hold a tensor of that name. Default: every rank saves
            the same names.
        recopies: how often a save is collected and copied anew because a tensor changed while it
            was copied, before it is refused; `stats()["recopied_saves"]` counts them. A save of
            several ranks, or one that overlaps training, is refused at once: what this rank would
            copy now does not belong to what was copied before.
        single_writer: accept an object store that cannot create if absent, because no other job
            ever writes here.
        compress: "planes-zstd" stores numbers by byte planes, those with a pattern entropy-coded,
            in the background; per tensor and only where samples say that it is worth it.
        delta: refer to what has not changed since the last save instead of writing it again; steps
            that are referred to stay. An int is how many saves in a row may refer to a tensor, True
            is 32. A process's first save writes everything; `handle.bytes` says what was written.
        run_id: name of this run in shared memory. A process that is killed leaves its last staged
            snapshot there, and the next processes with the same root and run id adopt it when
            they restore. Jobs that share a root need one each; object stores need one to adopt.
        shm_dir: folder of the staging slots; default: DRIVETRAIN_SHM_DIR, else /dev/shm.
        storage_options: options of the object store, as strings.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        keep: Keep | None = Keep(last=3, every=None),  # noqa: B008 (frozen)
        rank: int | None = None,
        world_size: int | None = None,
        on_error: Literal["raise", "warn"] = "raise",
        timeout: str | float = "10min",
        guard: Literal["version", "checksum"] | None = "version",
        staging: Literal["staged", "overlapped"] = "staged",
        allow_pickle: bool = False,
        on_busy: Literal["wait", "skip", "warn"] = "wait",
        stall_budget_ms: float | None = None,
        stage_ranks: Sequence[int] | None = None,
        recopies: int = 2,
        single_writer: bool = False,
        compress: Literal["planes-zstd"] | None = None,
        delta: bool | int = False,
        run_id: str | None = None,
        shm_dir: str | os.PathLike[str] | None = None,
        storage_options: dict[str, str] | None = None,
    ) -> None:
        check_choice("on_error", on_error, ("raise", "warn"))
        check_choice("on_busy", on_busy, ("wait", "skip", "warn"))
        check_choice("staging", staging, ("staged", "overlapped"))
        check_budget_ms(stall_budget_ms)
        check_recopies(recopies)
        self._staging, self._recopies, self._recopied_saves = staging, recopies, 0
        self._on_busy, self._stall_budget_ms = on_busy, stall_budget_ms
        self._uri = os.fspath(uri)
        self._on_error = on_error
        self._guard = check_mode(guard)
        self._allow_pickle = allow_pickle
        self._timeout_s = seconds(timeout, "timeout")
        self._rank, self._world_size = meeting.ranks(rank, world_size)
        self._stage_ranks = checked_stage(stage_ranks, self._rank, self._world_size)
        self._pid = os.getpid()
        self._pending: list[SaveHandle] = []
        self._restores = self._saves = 0
        self._blocks: dict[Path, Block] = {}
        """What the last save took as blocks."""
        self._failed_saves = self._skipped_saves = 0
        self._warned_private = False
        self._preemption: Preemption | None = None
        self._closed = True  # until there is something to close
        store, self._store_origin = meeting.own_store(self._rank, self._world_size)
        self._native = _native.Checkpointer(
            self._uri,
            self._rank,
            self._world_size,
            **(keep.native_rules() if keep is not None else {}),
            timeout_s=self._timeout_s,
            run_id=run_id,
            shm_dir=None if shm_dir is None else os.fspath(shm_dir),
            single_writer=single_writer,
            **packing(compress, delta),
            storage_options=storage_options,
            store=store,
        )
        self._closed = False
        close_at_exit(self)

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Ranks that save together."""
        return self._world_size

    @property
    def failed_saves(self) -> int:
        """Saves that failed so far, each also raised or warned about."""
        return self._failed_saves

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.close()
            return
        try:
            self.close()
        except Exception as late:
            # the error that is already on its way says more
            warnings.warn(f"checkpoint: {late}", RuntimeWarning, stacklevel=2)

    def __repr__(self) -> str:
        return f"Checkpointer({self._uri!r}, rank={self._rank}, world_size={self._world_size})"

    def save(
        self,
        step: int,
        state: dict[str, Any],
        blocking: bool = False,
        rng: bool = True,
        overwrite: bool = False,
        metrics: Mapping[str, float] | None = None,
    ) -> SaveHandle:
        """Copies the state and commits it as `step`, in the background unless `blocking`.

        Args:
            step: 0 or more; every rank saves the same steps.
            state: names to values: objects with `state_dict` and `load_state_dict` (models,
                optimizers, schedulers, scalers, loaders), nested dicts of None, bool, int, float,
                str, bytes, tensors, numpy values, lists and tuples, `PerRank` or `Sharded`.
                Optimizer state is stored by parameter name when its model comes along.
            blocking: return after the commit.
            rng: save the random generators of each rank, too.
            overwrite: replace the step if it is committed already; else that is refused.
            metrics: what was measured of this state, such as `{"val_loss": 0.3}`, for
                `Keep(best=...)` and people; rank 0's are kept.

        Returns a handle; the tensors may be changed as soon as it is there.

        Raises `Unsupported` with the path of a value that cannot be stored, `PeerFailed` with the
        rank that failed or differs, and failures of earlier saves nobody has seen; the new save is
        made all the same.
        """
        self._check_usable()
        check_step(step)
        measured = checked_metrics(metrics)
        self._saves += 1
        self._join_overlap()
        finished = [handle for handle in self._pending if handle.done()]
        try:
            handle = self._start(step, state, blocking, rng, overwrite, measured)
        except SOFT_FAILURES as error:
            self._failed_saves += 1
            if self._on_error == "raise":
                raise
            self._warn(step, error)
            return SaveHandle(step, None, error=error)
        if blocking:
            self._finish(handle)
        # Not before the new save: a rank that has not seen the failure yet makes this save, too.
        self._report(finished)
        return handle

    def _join_overlap(self) -> None:
        """Ends a copy in the background: saves reach the native side in the order of the calls."""
        for handle in list(self._pending):
            handle._join_overlap(None)

    def _finish(self, handle: SaveHandle) -> None:
        try:
            handle.wait()
        except SOFT_FAILURES as error:
            if self._on_error == "raise":
                raise
            self._warn(handle.step, error)

    def _start(
        self,
        step: int,
        state: dict[str, Any],
        blocking: bool,
        rng: bool,
        overwrite: bool,
        metrics: dict[str, float],
    ) -> SaveHandle:
        started = time.perf_counter()
        overlapped = self._staging == "overlapped" and not blocking
        # Of several ranks the others keep what was true before the change: a part that is copied
        # after it does not belong to theirs.
        recopies = 0 if overlapped or self._world_size > 1 else self._recopies
        for copies in range(recopies + 1):
            found = self._collect(step, state, rng, overlapped)
            collected_s = time.perf_counter() - started
            may_repeat = copies < recopies
            stage = self._stager(step, found, blocking, overwrite, metrics, may_repeat)
            if overlapped:
                overlap = Overlap(stage)
                del found
                handle = SaveHandle(step, None, collected_s, on_seen=self._seen, overlap=overlap)
                self._pending.append(handle)
                return handle
            try:
                native = stage()
                break
            except _native.SaveSkipped:  # of a blocking save
                self._skipped_saves += 1
                return SaveHandle(step, None, time.perf_counter() - started, skipped=True)
            except _native.Corrupt:
                if not (may_repeat and found.guard.changed):
                    raise
            self._recopied_saves += 1
        del found, stage
        stopped_s = time.perf_counter() - started
        if blocking:  # then the trainer waits for the disk by choice, which is no staging
            stopped_s = collected_s + native.staged_seconds
        handle = SaveHandle(step, native, stopped_s, on_seen=self._seen, recopies=copies)
        self._pending.append(handle)
        self._check_budget(step, stopped_s)
        self._warn_private()
        return handle

    def _collect(self, step: int, state: dict[str, Any], rng: bool, overlapped: bool) -> Collected:
        """Looks at all that is to be saved; nothing large is copied yet."""
        try:
            known = None if overlapped else self._blocks
            snapshot = Snapshot(
                self._rank, self._world_size, self._allow_pickle, self._stage_ranks, known
            )
            with paused_collector():
                snapshot.add_all(state)
                if rng:
                    snapshot.add_rng(rng_state())
                guard = Guard(snapshot.pieces, self._guard, snapshot.found)
                if overlapped:
                    snapshot.copy_others()
                    guard.check()
                    guard = Guard(snapshot.steady_pieces(), self._guard)
                tensors, alive = snapshot.native_tensors()
                texts = snapshot.state_json(), snapshot.per_rank_json()
            if not overlapped:
                self._blocks = {found.block.path: found.block for found in snapshot.found}
            alive.append(snapshot.found)
            blocks = [(found.block.rows, found.addresses) for found in snapshot.found]
            return Collected(guard, tensors, alive, *texts, blocks)
        except Exception as error:
            # without this the other ranks would wait for us until their deadline
            self._native.refuse(step, str(error))
            raise

    def _stager(
        self,
        step: int,
        found: Collected,
        blocking: bool,
        overwrite: bool,
        metrics: dict[str, float],
        may_repeat: bool,
    ) -> Callable[[], _native.SaveHandle]:
        def stage() -> _native.SaveHandle:
            return self._native.save(
                step,
                found.tensors,
                found.state_json,
                found.per_rank_json,
                blocking=blocking,
                overwrite=overwrite,
                check=found.guard.check,
                skip_after_s=self._skip_after_s(),
                metrics=metrics,
                stage=self._stage_ranks[0] if self._stage_ranks else None,
                may_repeat=may_repeat,
                blocks=found.blocks,
            )

        return stage

    def _warn_private(self) -> None:
        if self._warned_private or (reason := self._native.private_reason) is None:
            return
        self._warned_private = True
        warnings.warn(
            "checkpoints are staged in private memory, which does not outlive a killed "
            f"process: {reason}",
            RuntimeWarning,
            stacklevel=5,
        )

    def _skip_after_s(self) -> float | None:
        return (self._stall_budget_ms or 0.0) / 1000 if self._on_busy == "skip" else None

    def _check_budget(self, step: int, stopped_s: float) -> None:
        if self._on_busy == "warn":
            warn_over_budget(step, stopped_s * 1000, self._stall_budget_ms, stacklevel=5)

    def restore(
        self,
        state: dict[str, Any],
        step: int | None = None,
        strict: bool = True,
        rng: bool = True,
        rename: Rename | None = None,
    ) -> Restored:
        """Loads the newest good step into the given objects, in place; all ranks the same one.

        Args:
            state: as for `save`; live tensors and dicts are filled, objects get `load_state_dict`.
                It may have fewer names than the checkpoint.
            step: exactly this one, without falling back; None: the newest that is good.
            strict: refuse when targets and checkpoint do not have the same names and shapes; else
                load what fits and report the rest in `missing`, `unexpected` and `reshaped`.
            rng: set the random generators if the checkpoint has them.
            rename: from saved names of tensors to wanted ones, such as
                ``{"model.layers.{i}.w": "model.blocks.w[{i}]"}``: ``{i}`` is a part of a name
                without dots, ``*`` any text, and ``[{i}]`` at the end a row, which stacks tensors
                into one or takes one apart; the first pattern that matches counts. Or a function
                from a saved name to a wanted one, a list of one name per row, or None to leave it
                out. Optimizer state follows its parameters. `plan` says what would happen.

        Returns what was done; `step` is None, and nothing was touched, if nothing is committed.

        Raises `CheckpointDamaged` if there are steps but none is good, with each reason, `NotFound`
        for a named step that is not there, `InvalidArgument` for shapes or names that do not fit.
        """
        self._check_usable()
        if step is not None:
            check_step(step)
        self._join_overlap()
        self._restores += 1
        # later restores, and those after a save, find nothing: a save drops what was left
        adopted = Adoption()
        if self._restores == 1 and self._saves == 0:
            adopted = adopt(self._native, self._rank, self._world_size, self._restores, step)
        run = self._restore(rename)
        run.skipped = [found for found in adopted.skipped if step is None]
        restored = run.run(state, step, strict, rng)
        restored.skipped = run.skipped
        restored.adopted = adopted.step is not None and restored.step == adopted.step
        return restored

    def plan(
        self, state: dict[str, Any], step: int | None = None, rename: Rename | None = None
    ) -> RestorePlan:
        """What `restore` would load into these objects on this rank; nothing is touched.

        Args:
            state: as for `restore`.
            step: this one; None: the newest whose manifest and files are in order.
            rename: as for `restore`.

        Raises as `restore` does for what is damaged or does not fit at all; names and shapes that
        differ are in the result.
        """
        self._check_usable()
        if step is not None:
            check_step(step)
        return self._restore(rename).look(state, step)

    def _restore(self, rename: Rename | None) -> Restore:
        return Restore(
            self._native,
            self._uri,
            self._rank,
            self._world_size,
            self._restores,
            self._allow_pickle,
            rename=rename,
            stage_ranks=self._stage_ranks,
        )

    def steps(self) -> list[int]:
        """The committed steps, ascending."""
        self._check_usable()
        return list(self._native.steps())

    def verify(self, step: int) -> Verified:
        """Reads a whole step and compares every checksum; nothing is loaded."""
        self._check_usable()
        check_step(step)
        found = self._native.verify(step)
        return Verified(step, tuple(Problem(file, dotted(path), why) for file, path, why in found))

    def stats(self) -> dict[str, Any]:
        """What was done so far: `failed_saves`, `skipped_saves`, and `io`, reads and writes.

        `recopied_saves` counts copies that were made anew, because a tensor changed meanwhile.
        `io` has `uring_writes`, `thread_writes`, `direct_writes`, `written_bytes` and their
        `..._reads` and `read_bytes`; `object_requests` and `retries` for object stores.
        """
        return {
            "failed_saves": self.failed_saves,
            "skipped_saves": self._skipped_saves,
            "recopied_saves": self._recopied_saves,
            "io": self._native.io_counters(),
        }

    def prepare(self, nbytes: int | None = None) -> None:
        """Makes and touches staging memory for states of about `nbytes` bytes on this rank.

        Otherwise the first save does it, and stops the trainer that much longer: touching new
        memory costs ten times a copy. Without `nbytes` it is done in the background, for states
        like the newest committed one; without any there is nothing to do.
        """
        self._check_usable()
        if nbytes is None:
            self._native.prepare_like_newest()
        else:
            self._native.prepare(nbytes)

    def preemption(
        self, signals: Sequence[str | int] = ("SIGTERM",), grace: str | float = "25s"
    ) -> Preemption:
        """Listens for the signals that say this process will be taken away soon.

        All ranks call it, at the same place. After a signal to any of them, `should_stop` turns
        true on all ranks at the same step; saves on their way are flushed meanwhile, and the loop
        decides whether to save once more. A handler that was installed before is still called. If
        there was none and `should_stop` has not said so within `grace`, saves are flushed and the
        process ends with the exit code of that signal, 128 and its number.

        Args:
            signals: names or numbers.
            grace: how long after the signal the loop may take to look, seconds or text.

        Returns the installed handlers; `close` takes them down.
        """
        self._check_usable()
        if self._preemption is not None:
            raise _native.InvalidArgument("preemption: expected one call, found a second")
        self._preemption = Preemption(self, signals, grace)
        return self._preemption

    @property
    def should_stop(self) -> bool:
        """True when the ranks have agreed to stop after this step; see `preemption`.

        Every rank reads it exactly once per step: the readings are what the ranks agree on. Always
        false without `preemption`.
        """
        return self._preemption is not None and self._preemption.should_stop()

    def close(self) -> None:
        """Waits for saves on their way and reports failed ones. A second call does nothing."""
        if self._closed:
            return
        self._check_usable()
        limit = time.monotonic() + self._timeout_s
        if self._preemption is not None:
            self._preemption.uninstall()
        try:
            for handle in list(self._pending):
                while not handle.done() and (left := limit - time.monotonic()) > 0:
                    handle.pause(min(left, WAIT_SLICE_S))
            self._report([handle for handle in self._pending if handle.done()])
            if self._pending:
                step = self._pending[0].step
                raise _native.DeadlineExceeded(
                    f"the commit of step {step} did not happen within {self._timeout_s} s; the "
                    "step may still appear, look at steps() before you use it"
                )
        finally:
            self._closed = True
            self._native.close()

    def __del__(self) -> None:
        # an error on the way in leaves a half-made object
        if getattr(self, "_closed", True) or not self.must_close():
            return
        try:
            self.close()
        except Exception as error:
            warnings.warn(f"checkpoint: {error}", RuntimeWarning, stacklevel=1)

    def must_close(self) -> bool:
        """Whether it is open, and of this process."""
        return not self._closed and os.getpid() == self._pid

    def _check_usable(self) -> None:
        if self._closed:
            raise _native.Closed(f"the Checkpointer of {self._uri} was closed")
        if os.getpid() != self._pid:
            raise _native.Unsupported(
                f"using the Checkpointer of {self._uri} in a forked process is not supported: its "
                "threads stayed with the parent; make a Checkpointer after the fork"
            )

    def _seen(self, handle: SaveHandle) -> None:
        if handle in self._pending:
            self._pending.remove(handle)
            if handle.failure() is not None:
                self._failed_saves += 1
            if handle.skipped:
                self._skipped_saves += 1

    def _report(self, finished: list[SaveHandle]) -> None:
        """Raises or warns about failures of finished saves that nobody has seen."""
        failures = []
        for handle in finished:
            if (error := handle.failure()) is not None:
                failures.append((handle.step, error))
            self._seen(handle)
        if not failures:
            return
        if self._on_error == "raise":
            for step, error in failures[1:]:
                failures[0][1].add_note(f"The save of step {step} failed, too: {error}")
            raise failures[0][1]
        for step, error in failures:
            self._warn(step, error)

    def _warn(self, step: int, error: Exception) -> None:
        warnings.warn(
            f"the checkpoint of step {step} was not committed: {error}",
            RuntimeWarning,
            stacklevel=3,
        )
