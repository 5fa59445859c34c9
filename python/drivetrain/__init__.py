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
from drivetrain._dataset import Dataset, Field, Row, index, open
from drivetrain._loader import DataLoader
from drivetrain._native import (
    AlreadyExists,
    CheckpointDamaged,
    Closed,
    Corrupt,
    DeadlineExceeded,
    DrivetrainError,
    InvalidArgument,
    MemoryHeld,
    NoSpace,
    NotFound,
    PeerFailed,
    SaveSkipped,
    SourceChanged,
    StorageError,
    Unsupported,
    __version__,
)
from drivetrain._requests import Image, Points
from drivetrain._values import Boxes, Calibration, PointCloud, Pose

__all__ = [
    "AlreadyExists",
    "Boxes",
    "Calibration",
    "CheckpointDamaged",
    "Checkpointer",
    "Closed",
    "Corrupt",
    "DataLoader",
    "Dataset",
    "DeadlineExceeded",
    "DrivetrainError",
    "Field",
    "Image",
    "InvalidArgument",
    "Keep",
    "MemoryHeld",
    "NoSpace",
    "NotFound",
    "PeerFailed",
    "PerRank",
    "PointCloud",
    "Points",
    "Pose",
    "Row",
    "SaveSkipped",
    "Sharded",
    "SourceChanged",
    "StorageError",
    "Unsupported",
    "__version__",
    "index",
    "open",
    "rng_state",
    "set_rng_state",
    "torch",
]


def __getattr__(name: str) -> Any:
    if name == "torch":
        # Importing it imports torch, which takes seconds and is not needed for numpy.
        return importlib.import_module("drivetrain.torch")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
