"""Who saves together: this process's rank, the world's size, and the store where ranks meet.

Never a collective: a checkpoint's meeting must not meet the training's, and needs a deadline.
"""

import os
import platform
from typing import Any

from drivetrain._checkpoint.dtypes import loaded
from drivetrain._native import InvalidArgument

#: Stores inside stores (prefix over prefix over TCP); more is a cycle.
STORES_MAX = 8


def process_group() -> Any:
    """`torch.distributed` if the program uses it, else None."""
    distributed = loaded("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


def ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and world size: as given, else torch.distributed's, else RANK/WORLD_SIZE, else 0 and 1.

    Raises `InvalidArgument` when only one is given or the rank lies outside the world.
    """
    if (rank is None) != (world_size is None):
        raise InvalidArgument("rank and world_size: expected both or none, found one")
    if rank is None or world_size is None:
        if (group := process_group()) is not None:
            rank, world_size = group.get_rank(), group.get_world_size()
        else:
            rank, world_size = _from_environment("RANK", 0), _from_environment("WORLD_SIZE", 1)
    if not 0 <= rank < world_size:
        raise InvalidArgument(f"rank: expected 0 to {world_size - 1}, found {rank}")
    return rank, world_size


def _from_environment(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise InvalidArgument(
            f"{name}: expected an int in the environment, found {text!r}"
        ) from None


def own_store(rank: int, world_size: int) -> tuple[Any, Any]:
    """A connection of our own to torch's store, and the store it came from, which must stay alive.

    (None, None) where there is no store that these very ranks share: they meet through files.
    A connection of our own, since a blocking wait holds the lock of the one training uses.
    """
    group = process_group()
    if world_size == 1 or group is None:
        return None, None
    if (group.get_rank(), group.get_world_size()) != (rank, world_size):
        return None, None
    try:
        store = group.distributed_c10d._get_default_store()
    except (AttributeError, RuntimeError, ValueError):
        return None, None  # a backend that needs no store, such as MPI
    try:
        return store.clone(), store
    except (AttributeError, NotImplementedError, RuntimeError):
        return _second_connection(store, world_size), store


def _second_connection(store: Any, world_size: int) -> Any:
    """The same for torch before `Store.clone`."""
    from datetime import timedelta

    distributed = process_group()
    for _ in range(STORES_MAX):
        if not isinstance(store, distributed.PrefixStore):
            break
        store = store.underlying_store
    if isinstance(store, distributed.TCPStore):
        timeout = timedelta(seconds=60)
        return distributed.TCPStore(
            store.host, store.port, None, False, timeout=timeout, wait_for_workers=False
        )
    if isinstance(store, distributed.FileStore):
        return distributed.FileStore(store.path, world_size)
    return None


def machine() -> str:
    """Equal for processes that share a kernel, and with it the page cache."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    return f"{platform.node()} {boot}"
