"""What a user hands to a `Checkpointer` and gets back from it."""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from drivetrain._checkpoint.durations import seconds
from drivetrain._native import InvalidArgument

#: More steps than anybody keeps; the engine counts them in 32 bits.
KEEP_LAST_MAX = 2**32 - 1
KEEP_EVERY_MAX = 2**63 - 1
#: A state that changes under every one of so many copies will not hold still for the next.
RECOPIES_MAX = 16
#: Steps are signed 64-bit numbers in the manifest.
STEP_MAX = 2**63 - 1


@dataclass(frozen=True)
class Keep:
    """Which committed steps stay after a commit: those that any of these rules wants.

    The newest good one always stays, and so do steps that others refer to and what Drivetrain did
    not write here. A step folder copied into the root is such a step until it is adopted
    (`drivetrain ckpt adopt`).

    Args:
        last: this many newest steps; None keeps all.
        every: also every step that is a multiple of this; None adds none.
        best: also this many best steps by `metric`, as given to `save(metrics=...)`; of equal ones
            the newer. A value that is not finite never counts.
        metric: name of that metric.
        mode: "min" if lower is better, "max" if higher is.
        within: also every step committed within this long before the newest commit, seconds or
            text such as "7d".
        interval: also steps at least this far apart in time, seconds or text such as "1h": from the
            oldest on, a step stays if it was committed at least this long after the one before it
            that stays by this rule.
    """

    last: int | None = 3
    every: int | None = None
    best: int | None = None
    metric: str | None = None
    mode: Literal["min", "max"] = "min"
    within: str | float | None = None
    interval: str | float | None = None

    def __post_init__(self) -> None:
        limits = (("last", KEEP_LAST_MAX), ("every", KEEP_EVERY_MAX), ("best", KEEP_LAST_MAX))
        for name, most in limits:
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 1 <= value <= most):
                raise InvalidArgument(
                    f"Keep.{name}: expected an int from 1 to {most} or None, found {value!r}"
                )
        if (self.best is None) != (self.metric is None):
            raise InvalidArgument("Keep.best and Keep.metric: expected both or none, found one")
        if self.mode not in ("min", "max"):
            raise InvalidArgument(f'Keep.mode: expected "min" or "max", found {self.mode!r}')
        self.native_rules()

    def native_rules(self) -> dict[str, Any]:
        """Arguments of the engine."""
        found: dict[str, Any] = {"keep_last": self.last, "keep_every": self.every}
        if self.best is not None:
            found["keep_best"] = (self.best, self.metric, self.mode == "max")
        if self.within is not None:
            found["keep_within_s"] = seconds(self.within, "Keep.within")
        if self.interval is not None:
            found["keep_interval_s"] = seconds(self.interval, "Keep.interval")
        return found


def check_step(step: object) -> None:
    """Refuses what is no step."""
    if type(step) is not int or not 0 <= step <= STEP_MAX:
        raise InvalidArgument(f"step: expected an int of 0 or more, found {step!r}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuses what is none of the choices, by the argument's name."""
    if value not in choices:
        quoted = [f'"{choice}"' for choice in choices]
        expected = " or ".join([", ".join(quoted[:-1]), quoted[-1]])
        raise InvalidArgument(f"{name}: expected {expected}, found {value!r}")


def check_budget_ms(budget_ms: float | None) -> None:
    """Refuses what is no duration."""
    if budget_ms is not None and not budget_ms >= 0:
        raise InvalidArgument(
            f"stall_budget_ms: expected milliseconds from 0 up, found {budget_ms!r}"
        )


def check_recopies(recopies: object) -> None:
    """Refuses what is no count of copies."""
    if type(recopies) is not int or not 0 <= recopies <= RECOPIES_MAX:
        raise InvalidArgument(
            f"recopies: expected an int from 0 to {RECOPIES_MAX}, found {recopies!r}"
        )


def warn_over_budget(
    step: int, stopped_ms: float, budget_ms: float | None, stacklevel: int
) -> None:
    """Warns of a save that stopped the trainer for longer than that."""
    if budget_ms is not None and stopped_ms > budget_ms:
        warnings.warn(
            f"the save of step {step} stopped the trainer for {stopped_ms:.0f} ms, more than the "
            f'{budget_ms:g} ms of stall_budget_ms: save less often, or use on_busy="skip"',
            RuntimeWarning,
            stacklevel=stacklevel,
        )


def checked_metrics(metrics: Mapping[str, float] | None) -> dict[str, float]:
    """Metrics as plain floats; `InvalidArgument` names what is none."""
    found: dict[str, float] = {}
    for name, value in (metrics or {}).items():
        try:
            # also numpy scalars and tensors of one element
            found[name] = float(value)
        except (TypeError, ValueError):
            found = {}
        if not isinstance(name, str) or name not in found:
            raise InvalidArgument(
                f"metrics: expected names to numbers, found {name!r}: {type(value).__name__}"
            )
    return found


@dataclass(frozen=True)
class SavedBytes:
    """Bytes of one rank's part of a save.

    Args:
        raw: its tensors as they are in memory.
        referred: of them, those that lie in earlier steps already and were not written.
        written: the files that were written, headers included.
    """

    raw: int
    referred: int
    written: int


@dataclass
class PerRank:
    """A value that differs between ranks: each rank gets its own back.

    A rank that did not exist at the save gets rank 0's. On restore, `value` of a PerRank in a given
    dict is replaced.
    """

    value: Any


@dataclass
class Sharded:
    """A part of a tensor that is spread over ranks, for code without DTensor.

    Every rank gives its own rectangle, or its range of the flattened tensor (`Sharded.flat`);
    together they must cover the global tensor exactly once. Either kind restores what the other
    saved.

    Args:
        tensor: this rank's part, a torch tensor or numpy array, any strides.
        global_shape: shape of the whole tensor, one int per dimension of `tensor`.
        offsets: index of the part's first element in the whole, one int per dimension.
        replicas: ranks that hold an identical part, this one included; None: this rank alone.
        flat_start: instead of offsets; see `flat`.
    """

    tensor: Any
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    replicas: tuple[int, ...] | None = None
    flat_start: int | None = None

    @classmethod
    def flat(
        cls,
        tensor: Any,
        global_shape: tuple[int, ...],
        start: int,
        replicas: tuple[int, ...] | None = None,
    ) -> "Sharded":
        """A range of the flattened tensor, as ZeRO and distributed optimizers partition state.

        Args:
            tensor: its elements in row-major order, 1-D; any number of them, also none.
            global_shape: shape of the whole tensor.
            start: index of the first element in the flattened tensor.
            replicas: ranks that hold an identical range, this one included; None: this alone.
        """
        return cls(tensor, global_shape, (), replicas, start)

    def __post_init__(self) -> None:
        if self.flat_start is not None:
            self._check_flat(int(self.flat_start))
            return
        shape = tuple(int(n) for n in self.tensor.shape)
        self.global_shape = tuple(int(n) for n in self.global_shape)
        self.offsets = tuple(int(n) for n in self.offsets)
        fits = len(shape) == len(self.global_shape) == len(self.offsets) and all(
            offset >= 0 and offset + extent <= whole
            for extent, whole, offset in zip(shape, self.global_shape, self.offsets)
        )
        if not fits:
            raise ValueError(
                f"Sharded: expected a part inside {self.global_shape}, found shape {shape} "
                f"at {self.offsets}"
            )

    def _check_flat(self, start: int) -> None:
        shape = tuple(int(n) for n in self.tensor.shape)
        self.global_shape = tuple(int(n) for n in self.global_shape)
        whole = math.prod(self.global_shape)
        if len(shape) != 1 or not 0 <= start <= start + shape[0] <= whole:
            raise ValueError(
                f"Sharded.flat: expected a 1-D part of the {whole} elements of "
                f"{self.global_shape}, found shape {shape} at element {start}"
            )
        self.flat_start, self.offsets = start, (start,)


@dataclass(frozen=True)
class Problem:
    """One damaged place of a step."""

    file: str
    """Path of the file below the checkpoint root."""
    tensor: str
    """The tensor's keys joined by dots; empty if the damage is not inside one."""
    reason: str
    """What was expected and found."""


@dataclass(frozen=True)
class Verified:
    """Result of `Checkpointer.verify`."""

    step: int
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """True when every byte of the step is as it was committed."""
        return not self.problems


@dataclass
class Restored:
    """What `Checkpointer.restore` did."""

    step: int | None
    """The restored step; None when nothing was committed, and then nothing was touched."""
    skipped: list[tuple[int, str]] = field(default_factory=list)
    """Newer steps that could not be used, newest first, each with its reason."""
    state: dict[str, Any] = field(default_factory=dict)
    """What was loaded, by the names given; tensors are the live ones where those were filled."""
    per_rank_mapped: dict[int, int] = field(default_factory=dict)
    """This rank and the one whose per-rank values it got, if it did not exist at the save."""
    missing: list[str] = field(default_factory=list)
    """With `strict=False`: what the targets have and the checkpoint lacks."""
    unexpected: list[str] = field(default_factory=list)
    """With `strict=False`: what the checkpoint has and the targets lack."""
    reshaped: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    """With `strict=False`: name, stored shape and live shape of what was not loaded for that."""
    renamed: dict[str, str] = field(default_factory=dict)
    """With `rename`: saved to loaded names of what differs."""
    adopted: bool = False
    """True if the step was staged by a process that was killed, and committed only now."""


@dataclass
class RestorePlan:
    """What `Checkpointer.restore` would do, from `Checkpointer.plan`; nothing was touched."""

    step: int | None
    """The step that would be restored; None when nothing is committed."""
    loaded: list[str] = field(default_factory=list)
    """Names of the tensors that would be filled or made."""
    nbytes: int = 0
    """Their bytes on this rank."""
    missing: list[str] = field(default_factory=list)
    """What the targets have and the checkpoint lacks."""
    unexpected: list[str] = field(default_factory=list)
    """What the checkpoint has and the targets lack."""
    reshaped: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    """Name, stored shape and live shape of what does not fit."""
    renamed: dict[str, str] = field(default_factory=dict)
    """With `rename`: saved to wanted names of what differs."""

    @property
    def ok(self) -> bool:
        """True when `restore` with `strict=True` would load everything."""
        return not (self.missing or self.unexpected or self.reshaped)
