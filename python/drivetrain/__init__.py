"""Drivetrain: data loading and checkpoint I/O for training autonomous-driving models."""

from drivetrain._native import __version__

__all__ = ["__version__"]
