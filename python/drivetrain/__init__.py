"""Drivetrain: data loading and checkpoint I/O for training autonomous-driving models."""

from drivetrain._checkpoint import (
    Checkpointer,
    Keep,
    PerRank,
    Sharded,
    rng_state,
    set_rng_state,
)
from drivetrain._loader import DataLoader
from drivetrain._native import __version__
from drivetrain._requests import Image, Points

__all__ = [
    "Checkpointer",
    "DataLoader",
    "Image",
    "Keep",
    "PerRank",
    "Points",
    "Sharded",
    "__version__",
    "rng_state",
    "set_rng_state",
]
