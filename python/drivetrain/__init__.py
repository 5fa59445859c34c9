"""Drivetrain: data loading and checkpoint I/O for training autonomous-driving models."""

from drivetrain._checkpoint import (
    Checkpointer,
    Keep,
    PerRank,
    Sharded,
    rng_state,
    set_rng_state,
)
from drivetrain._native import __version__

__all__ = [
    "Checkpointer",
    "Keep",
    "PerRank",
    "Sharded",
    "__version__",
    "rng_state",
    "set_rng_state",
]
