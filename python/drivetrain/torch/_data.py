"""Data sets for torch.utils.data.DataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, get_worker_info

if TYPE_CHECKING:
    from drivetrain._dataset import Dataset
    from drivetrain._loader import DataLoader


class MapDataset(TorchDataset):
    """A Drivetrain data set as a map-style torch data set: `ds[i]` in its natural form."""

    def __init__(self, ds: Dataset) -> None:
        self._ds = ds

    def __len__(self) -> int:
        return len(self._ds)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._ds[index]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Samples of one batch, as torch's DataLoader asks for them before collating."""
        return [self._ds[int(index)] for index in indices]


class IterableBatches(IterableDataset):
    """A Drivetrain loader as an iterable torch data set of whole batches.

    For `DataLoader(dataset, batch_size=None, num_workers=k)`: worker w delivers steps w, w + k,
    ..., so that torch, which takes from its workers in turn, hands out the native order. Each
    worker is a process with decoder threads of its own. The position that a training job stores
    is counted where batches arrive: call `loader.set_epoch` (or `load_state_dict`) before each
    pass, since workers get a copy of the loader as it stands then.
    """

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        if info is None:
            yield from self._loader
            return
        for batch in self._loader._iterate(info.id, info.num_workers):
            yield {name: _portable(value) for name, value in batch.items()}


def _portable(value: Any) -> Any:
    """Views of native memory cannot travel between processes; bytes can."""
    if isinstance(value, list):
        return [bytes(v) if isinstance(v, memoryview) else v for v in value]
    return value


def as_map(ds: Dataset) -> MapDataset:
    """A map-style data set with `__getitems__` over `ds`."""
    return MapDataset(ds)


def as_iterable(loader: DataLoader) -> IterableBatches:
    """An iterable data set of the batches of `loader`, for any number of torch workers."""
    return IterableBatches(loader)
