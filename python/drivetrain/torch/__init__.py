"""What plugs into torch: data sets for its DataLoader, storage for its distributed checkpoints.

Imported only when used.
"""

from drivetrain.torch._data import IterableBatches, MapDataset, as_iterable, as_map

__all__ = [
    "IterableBatches",
    "MapDataset",
    "Stager",
    "StorageReader",
    "StorageWriter",
    "as_iterable",
    "as_map",
]

#: Loaded when first asked for: torch.distributed.checkpoint costs a second to import.
_LAZY = ("Stager", "StorageReader", "StorageWriter")


def __getattr__(name: str) -> object:
    if name in _LAZY:
        from drivetrain.torch import dcp

        return getattr(dcp, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
