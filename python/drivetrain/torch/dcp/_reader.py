"""The reading half of the plug-in."""

from __future__ import annotations

import io
import os
import uuid
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as TorchStorageReader
from torch.futures import Future

from drivetrain import _native
from drivetrain._checkpoint import pieces, typed_json
from drivetrain.torch.dcp import _metadata
from drivetrain.torch.dcp._uri import OneFolder, rank_folder

#: Bytes of copies in flight for targets that cannot be filled in place.
COPY_BYTES_MAX = 64 << 20


class StorageReader(OneFolder, TorchStorageReader):
    """Loads Drivetrain checkpoint folders through torch.distributed.checkpoint.

    Every chunk that is read is checked against its checksum, and every element that is asked for
    comes from exactly one chunk, or the load fails and names the tensor. Reads folders that
    `StorageWriter`, `Checkpointer` or `drivetrain ckpt convert` wrote.

    Args:
        uri: the folder with the manifest.json; `checkpoint_id` replaces it.
        storage_options: options of the object store, as strings.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str] | None = None,
        *,
        storage_options: dict[str, str] | None = None,
    ) -> None:
        super().__init__()
        self._uri = None if uri is None else os.fspath(uri)
        self._storage_options = storage_options
        self._load_id = uuid.uuid4().hex
        self._opened: Any = None
        self._stored: _metadata.Stored | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None, "_stored": None}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepares for another checkpoint."""
        super().reset(checkpoint_id)
        self._opened, self._stored = None, None
        self._load_id = uuid.uuid4().hex

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Opens the folder: the manifest's seal, the files' sizes and the table are checked."""
        if self._uri is None:
            raise _native.InvalidArgument("checkpoint_id: expected a folder, found None")
        rank = kwargs.get("rank")
        uri = self._uri if rank is None else rank_folder(self._uri, rank)
        self._opened = _native.open_checkpoint(uri, self._storage_options)
        self._stored = _metadata.Stored(self._opened, _native.checkpoint_chunks(self._opened))
        metadata = self._stored.metadata
        if metadata.storage_meta is not None:
            metadata.storage_meta.checkpoint_id = self._uri
            metadata.storage_meta.load_id = self._load_id
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to set up: `read_metadata` has opened the folder."""
        if self._stored is None:
            self.read_metadata()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to add."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills the planner's tensors, straight into their memory where they are plain."""
        batch = _Batch(self._opened, planner)
        items = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        items.sort(
            key=lambda item: (item.storage_index.fqn, tuple(item.storage_index.offset or ()))
        )
        last = None
        for item in items:
            if item.storage_index != last and batch.copied_bytes >= COPY_BYTES_MAX:
                batch.read()
            last = item.storage_index
            batch.add(item, *self._source(item))
        batch.read()
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._bytes(item.storage_index.fqn))
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _source(self, item: ReadItem) -> tuple[str, torch.dtype, list[int], list[int]]:
        """Path, dtype, whole shape and first element of what an item wants."""
        stored, name = self._stored, item.storage_index.fqn
        if stored is None or name not in stored.dtypes:
            raise _native.NotFound(f"tensor {name} in {self._uri}: the checkpoint has none")
        shape = stored.metadata.state_dict_metadata[name].size
        start = item.storage_index.offset or (0,) * len(shape)
        offsets = [int(a) + int(b) for a, b in zip(start, item.storage_offsets)]
        return stored.paths[name], stored.dtypes[name], list(shape), offsets

    def _bytes(self, name: str) -> io.BytesIO:
        """The torch.save archive of a value that is no tensor."""
        stored = self._stored
        if stored is not None and name in stored.foreign:
            length = stored.foreign[name]
            raw = torch.empty(length, dtype=torch.uint8)
            address, _ = pieces.address(raw)
            row = (stored.paths[name], "U8", [length], [0], [length], address, length)
            self._opened.read_into([row])
            return io.BytesIO(raw.numpy().tobytes())
        if stored is None or name not in stored.plain:
            raise _native.NotFound(f"{name} in {self._uri}: the checkpoint has none")
        node = stored.plain[name]
        is_value = isinstance(node, _metadata.Leaf)
        archive = io.BytesIO()
        torch.save(node.node if is_value else typed_json.decode(node), archive)
        archive.seek(0)
        return archive


def _storage_order(item: ReadItem) -> tuple[str, tuple[int, ...]]:
    index = item.storage_index
    return index.fqn, tuple(index.offset or ())


class _Batch:
    """Read items that are filled by one call."""

    def __init__(self, opened: Any, planner: LoadPlanner) -> None:
        self._opened = opened
        self._planner = planner
        self._rows: list[tuple] = []
        self._targets: list[tuple[ReadItem, torch.Tensor, torch.Tensor]] = []
        self.copied_bytes = 0

    def add(
        self, item: ReadItem, path: str, dtype: torch.dtype, shape: list[int], offsets: list[int]
    ) -> None:
        """Takes an item in; memory that is not plain gets a copy in between."""
        target = self._planner.resolve_tensor(item).detach()
        if target.shape != item.lengths:
            raise _native.InvalidArgument(
                f"{item.dest_index.fqn}: expected a target of {tuple(item.lengths)}, found "
                f"{tuple(target.shape)}"
            )
        filled = target
        if not _is_plain(target, dtype):
            filled = torch.empty(item.lengths, dtype=dtype)
            self.copied_bytes += filled.nbytes
        stored, _, more = _metadata.extra_dim(dtype)
        none = [0 for _ in more]
        address, length = pieces.address(filled)
        extent = [*(int(n) for n in item.lengths), *more]
        row = (path, stored, [*shape, *more], [*offsets, *none], extent, address, length)
        self._rows.append(row)
        self._targets.append((item, target, filled))

    def read(self) -> None:
        """Fills everything that was added."""
        if self._rows:
            self._opened.read_into(self._rows)
        for item, target, filled in self._targets:
            if filled is not target:
                target.copy_(filled)
            self._planner.commit_tensor(item, target)
        self._rows, self._targets, self.copied_bytes = [], [], 0


def _is_plain(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """True for row-major CPU memory of the stored dtype."""
    return (
        type(target) is torch.Tensor
        and target.device.type == "cpu"
        and target.dtype == dtype
        and target.is_contiguous()
        and not target.is_conj()
        and not target.is_neg()
    )
