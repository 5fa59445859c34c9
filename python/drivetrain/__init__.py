"""Drivetrain: data loading and checkpoint I/O for training autonomous-driving models."""

import importlib
from typing import Any

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
    "torch",
]


def __getattr__(name: str) -> Any:
    if name == "torch":
        # Importing it imports torch, which takes seconds and is not needed for numpy.
        return importlib.import_module("drivetrain.torch")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
