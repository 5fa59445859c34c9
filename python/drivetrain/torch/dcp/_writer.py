"""The writing half of the plug-in."""

from __future__ import annotations

import dataclasses
import io
import os
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter as TorchStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from drivetrain import _native
from drivetrain._checkpoint import pieces, typed_json
from drivetrain.torch.dcp import _metadata
from drivetrain.torch.dcp._uri import OneFolder, rank_folder

#: Version of DCP's metadata that torch 2.15 writes and this plug-in keeps.
DCP_VERSION = "1.0.0"
#: Name of the attempt for ranks whose plan comes from DCP's plan cache and names an older one.
NOTE = ".drivetrain-attempt"
#: Attempts that this process has written under, the one that was named last at the end; a plan
#: that names one is a cached plan, and names it again at every save.
_used_attempts: dict[str, None] = {}
#: Attempts that are remembered: far more than there are cached plans in use.
USED_ATTEMPTS_MAX = 4096


def _was_used(attempt: str) -> bool:
    """Whether this process has seen the attempt before; notes it."""
    seen = _used_attempts.pop(attempt, "new") is None
    _used_attempts[attempt] = None
    while len(_used_attempts) > USED_ATTEMPTS_MAX:
        del _used_attempts[next(iter(_used_attempts))]
    return seen


@dataclasses.dataclass
class StoredItem:
    """Where a write item went; travels from its rank to the coordinator."""

    attempt: str
    chunk: tuple | None = None
    """Row of the table of chunks."""
    plain: str | None = None
    """Typed JSON of a plain value."""
    foreign: bool = False
    """True for bytes that only torch can read."""
    files: list[tuple] = dataclasses.field(default_factory=list)
    """Files of the rank, with its first item."""


class StorageWriter(OneFolder, TorchStorageWriter):
    """Writes a checkpoint of torch.distributed.checkpoint as one Drivetrain checkpoint folder.

    Each rank writes what the planner gave it, with checksums; the coordinator writes the table of
    chunks and then, last, the manifest: a save that fails or is killed leaves no checkpoint.

    Args:
        uri: folder or object store URI of this checkpoint; `checkpoint_id` replaces it.
        overwrite: replace a checkpoint that is there, in one atomic step; else that is refused.
        storage_options: options of the object store, as strings.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str] | None = None,
        *,
        overwrite: bool = False,
        storage_options: dict[str, str] | None = None,
    ) -> None:
        super().__init__()
        self._uri = None if uri is None else os.fspath(uri)
        self._overwrite = overwrite
        self._storage_options = storage_options
        self._rank: int | None = None
        self._alone = False
        """True when ranks save without coordination: each its own folder inside this one."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Refuses a folder that holds a checkpoint, before anything is written."""
        self._rank = kwargs.get("rank")
        self._alone = not kwargs.get("use_collectives", True)
        if (is_coordinator or self._alone) and not self._overwrite:
            self._folder(_native.fresh_attempt()).refuse_committed()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Gives all ranks the folder of this save call, and each its number."""
        attempt = _native.fresh_attempt()
        if not all(plan.usable for plan in plans):
            # these ranks will take the plan of an earlier save from their cache
            self._folder(attempt).put_note(NOTE, attempt)
        first = self._rank or 0 if self._alone else 0
        return [
            dataclasses.replace(plan, storage_data=(attempt, first + number))
            for number, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's items; tensors are resolved one after the other."""
        attempt, rank = plan.storage_data
        if _was_used(attempt):
            attempt = self._folder(attempt).note(NOTE)
            _was_used(attempt)
        work = _RankWork(planner, attempt)
        for item in plan.items:
            work.add(item)
        if work.rows:
            folder = self._folder(attempt)
            work.written(*folder.write_rank(rank, work.rows, work.resolve))
        future: Future[list[WriteResult]] = Future()
        future.set_result(work.results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits: proves that every chunk was written, then table, fsync, manifest."""
        metadata.version = DCP_VERSION
        metadata.storage_meta = self.storage_meta()
        items = {result.index: result.storage_data for rank in results for result in rank}
        metadata.storage_data = items
        attempts = {item.attempt for item in items.values()}
        if len(attempts) > 1:
            raise _native.PeerFailed(f"ranks wrote under different attempts: {sorted(attempts)}")
        folder = self._folder(attempts.pop() if attempts else _native.fresh_attempt())
        files = [row for rank in results for result in rank for row in result.storage_data.files]
        paths = _metadata.paths_of(metadata)
        try:
            nodes, chunks = _nodes_and_chunks(metadata, paths, items)
            state = _metadata.state_json(metadata, paths, nodes)
            folder.publish(
                _native.step_of_folder(self._uri or ""),
                len(results),
                files,
                chunks,
                state,
                overwrite=self._overwrite,
            )
        except (_native.Unsupported, _native.PeerFailed, _native.AlreadyExists):
            folder.discard(files)
            raise
        folder.remove_note(NOTE)

    def storage_meta(self) -> StorageMeta | None:
        """The folder, for planners."""
        return StorageMeta(checkpoint_id=self._uri)

    def _folder(self, attempt: str) -> _native.CheckpointFolder:
        if self._uri is None:
            raise _native.InvalidArgument("checkpoint_id: expected a folder, found None")
        uri = rank_folder(self._uri, self._rank) if self._alone else self._uri
        return _native.CheckpointFolder(uri, attempt, self._storage_options)


class _RankWork:
    """The items of one rank: rows for the native writer, and their results."""

    def __init__(self, planner: SavePlanner, attempt: str) -> None:
        self._planner = planner
        self._attempt = attempt
        self._sources: list[WriteItem | torch.Tensor] = []
        self._waiting: list[WriteItem] = []
        self.rows: list[tuple] = []
        self.results: list[WriteResult] = []

    def add(self, item: WriteItem) -> None:
        """Takes an item in; values other than tensors are resolved now, since they are small."""
        if item.type != WriteItemType.BYTE_IO:
            self._add_tensor(item)
            return
        data = self._planner.resolve_data(item)
        raw = data.getvalue() if isinstance(data, io.BytesIO) else bytes(data)
        plain = _native.plain_torch_value(raw)
        if plain is not None:
            stored = StoredItem(self._attempt, plain=plain)
            self.results.append(WriteResult(item.index, len(raw), stored))
            return
        blob = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        path = typed_json.path_json((item.index.fqn,))
        self.rows.append((path, "U8", [len(raw)], [0], [len(raw)]))
        self._sources.append(blob)
        self._waiting.append(item)

    def _add_tensor(self, item: WriteItem) -> None:
        data = item.tensor_data
        stored, _, more = _metadata.extra_dim(data.properties.dtype)
        self.rows.append(
            (
                typed_json.path_json((item.index.fqn,)),
                stored,
                [*data.size, *more],
                [*data.chunk.offsets, *(0 for _ in more)],
                [*data.chunk.sizes, *more],
            )
        )
        self._sources.append(item)
        self._waiting.append(item)

    def resolve(self, at: int) -> tuple[int, int, Any]:
        """Address and bytes of a row, and what keeps them alive."""
        source = self._sources[at]
        if isinstance(source, torch.Tensor):
            return (*pieces.address(source), source)
        tensor = self._planner.resolve_data(source)
        expected = source.tensor_data
        if tensor.dtype != expected.properties.dtype or tensor.shape != expected.chunk.sizes:
            raise _native.InvalidArgument(
                f"{source.index.fqn}: expected {expected.properties.dtype} "
                f"{tuple(expected.chunk.sizes)} as planned, found {tensor.dtype} "
                f"{tuple(tensor.shape)}"
            )
        local = pieces.contiguous_cpu(tensor)
        return (*pieces.address(local), local)

    def written(self, files: list[tuple], chunks: list[tuple]) -> None:
        """Notes where the rows went."""
        by_place = {(row[0], tuple(row[4])): row for row in chunks}
        for item, row in zip(self._waiting, self.rows):
            chunk = by_place[row[0], tuple(row[3])]
            foreign = item.type == WriteItemType.BYTE_IO
            stored = StoredItem(self._attempt, chunk=chunk, foreign=foreign)
            self.results.append(WriteResult(item.index, chunk[8], stored))
        self.results[-1].storage_data.files = files


def _nodes_and_chunks(
    metadata: Metadata, paths: dict[str, tuple], items: dict[MetadataIndex, StoredItem]
) -> tuple[dict[str, Any], list[tuple]]:
    """Nodes of the state by name, and rows of the table; refuses what nobody wrote."""
    nodes: dict[str, Any] = {}
    chunks: list[tuple] = []
    for name, meta in metadata.state_dict_metadata.items():
        path = typed_json.path_json(paths[name])
        if isinstance(meta, TensorStorageMetadata):
            nodes[name] = _metadata.tensor_node(meta.properties.dtype, meta.size)
            found = [_chunk_of(name, meta, chunk, items) for chunk in meta.chunks]
            chunks.extend((path, *row[1:]) for row in found)
            continue
        item = items.get(MetadataIndex(name))
        if item is None:
            raise _native.PeerFailed(f"{name}: no rank wrote it")
        if item.plain is not None:
            nodes[name] = typed_json.loads(item.plain)
            continue
        row = item.chunk
        content = {"dtype": "U8", "shape": row[3], _metadata.FOREIGN: True}
        nodes[name] = {"~tensor": content}
        chunks.append((path, *row[1:]))
    return nodes, chunks


def _chunk_of(
    name: str,
    meta: TensorStorageMetadata,
    chunk: ChunkStorageMetadata,
    items: dict[MetadataIndex, StoredItem],
) -> tuple:
    item = items.get(MetadataIndex(name, chunk.offsets))
    if item is None:
        item = items.get(MetadataIndex(name)) if chunk.sizes == meta.size else None
    dims = len(chunk.sizes)
    if item is None or item.chunk is None or item.chunk[5][:dims] != list(chunk.sizes):
        raise _native.PeerFailed(
            f"{name}: no rank wrote the chunk at {tuple(chunk.offsets)} of {tuple(chunk.sizes)}"
        )
    return item.chunk
