"""Which rank of how many a loader serves: from arguments, a device mesh, torch or the environment.

Drivetrain never initialises collectives and never imports torch for this: a job that has not
imported torch has not initialised it either.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from drivetrain._native import InvalidArgument


def resolve_rank(
    rank: int | None, world_size: int | None, mesh: Any, dp_dims: Sequence[str]
) -> tuple[int, int]:
    """(rank, world size) of data parallelism.

    Explicit arguments win; then `mesh`: ranks along `dp_dims` get different samples, ranks along
    all other dimensions (TP, PP, CP) the same; then torch.distributed if it is initialised; then
    RANK and WORLD_SIZE; then 0 of 1.
    """
    if (rank is None) != (world_size is None):
        raise InvalidArgument("rank and world_size: expected both or none, found one of them")
    if rank is not None and world_size is not None:
        return rank, world_size
    if mesh is not None:
        return _of_mesh(mesh, dp_dims)
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return _of_environment()


def _of_environment() -> tuple[int, int]:
    names = ("RANK", "WORLD_SIZE")
    values = [os.environ.get(name) for name in names]
    if any(value is None for value in values):
        return 0, 1
    try:
        rank, world_size = (int(value) for value in values if value is not None)
    except ValueError:
        raise InvalidArgument(
            f"RANK and WORLD_SIZE in the environment: expected integers, found {values}"
        ) from None
    return rank, world_size


def _of_mesh(mesh: Any, dp_dims: Sequence[str]) -> tuple[int, int]:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise InvalidArgument("mesh: expected one that this rank is part of, found another")
    names = mesh.mesh_dim_names
    if names is None:
        if mesh.ndim != 1:
            raise InvalidArgument(
                f"mesh: expected named dimensions, found {mesh.ndim} without names; "
                "give mesh_dim_names to init_device_mesh"
            )
        return coordinate[0], mesh.size(0)
    dims = (dp_dims,) if isinstance(dp_dims, str) else tuple(dp_dims)
    unknown = [dim for dim in dims if dim not in names]
    if unknown or not dims:
        raise InvalidArgument(f"dp_dims: expected names out of {list(names)}, found {list(dims)}")
    rank, world_size = 0, 1
    for dim in dims:
        axis = names.index(dim)
        rank = rank * mesh.size(axis) + coordinate[axis]
        world_size *= mesh.size(axis)
    return rank, world_size
