"""What a user hands to a `Checkpointer` and gets back from it."""

from dataclasses import dataclass, field
from typing import Any

from drivetrain._native import InvalidArgument

#: More steps than anybody keeps; the engine counts them in 32 bits.
KEEP_LAST_MAX = 2**32 - 1
KEEP_EVERY_MAX = 2**63 - 1


@dataclass(frozen=True)
class Keep:
    """Which committed steps stay after a commit; the newest good one always does.

    Args:
        last: this many newest steps; None keeps all.
        every: also every step that is a multiple of this; None adds none.
    """

    last: int | None = 3
    every: int | None = None

    def __post_init__(self) -> None:
        for name, most in (("last", KEEP_LAST_MAX), ("every", KEEP_EVERY_MAX)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 1 <= value <= most):
                raise InvalidArgument(
                    f"Keep.{name}: expected an int from 1 to {most} or None, found {value!r}"
                )


@dataclass
class PerRank:
    """A value that differs between ranks: each rank gets its own back.

    A rank that did not exist at the save gets rank 0's. On restore, `value` of a PerRank in a given
    dict is replaced.
    """

    value: Any


@dataclass
class Sharded:
    """A rectangle of a tensor that is spread evenly over ranks, for code without DTensor.

    Every rank gives its own rectangle; together they must cover the global tensor exactly once.

    Args:
        tensor: this rank's part, a torch tensor or numpy array, any strides.
        global_shape: shape of the whole tensor, one int per dimension of `tensor`.
        offsets: index of the part's first element in the whole, one int per dimension.
        replicas: ranks that hold an identical part, this one included; None: this rank alone.
    """

    tensor: Any
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    replicas: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
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
    adopted: bool = False
    """True if the step was staged by a process that was killed, and committed only now."""
