"""What plugs into torch: data sets for its DataLoader. Imported only when used."""

from drivetrain.torch._data import IterableBatches, MapDataset, as_iterable, as_map

__all__ = ["IterableBatches", "MapDataset", "as_iterable", "as_map"]
