"""Checkpoints: from live training objects to commits and back."""

from drivetrain._checkpoint.checkpointer import Checkpointer
from drivetrain._checkpoint.handle import SaveHandle
from drivetrain._checkpoint.rng import rng_state, set_rng_state
from drivetrain._checkpoint.values import Keep, PerRank, Problem, Restored, Sharded, Verified

__all__ = [
    "Checkpointer",
    "Keep",
    "PerRank",
    "Problem",
    "Restored",
    "SaveHandle",
    "Sharded",
    "Verified",
    "rng_state",
    "set_rng_state",
]
