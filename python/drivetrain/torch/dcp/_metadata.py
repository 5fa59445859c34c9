"""DCP's `Metadata` as typed JSON, and back.

The state of the manifest holds the values as a tree, as a `Checkpointer` writes it; what DCP knows
besides lies beside it under ``~dcp``: names in order, planner data, deprecated tensor properties.
Chunks are in the table. Nothing is a pickle.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from drivetrain._checkpoint import dtypes, typed_json
from drivetrain._native import Corrupt, Unsupported

#: Name of DCP's own part of the state.
DCP = "~dcp"
#: Marks bytes that are a pickle in a torch.save archive; never loaded but by torch itself.
FOREIGN = "foreign_pickle"

_FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "preserve_format": torch.preserve_format,
}
_PROPERTIES = ("requires_grad", "pin_memory", "layout", "memory_format", "strides")

Path = tuple[str | int, ...]


class Leaf:
    """A node that stands for itself in a tree of values."""

    def __init__(self, node: Any) -> None:
        self.node = node


def extra_dim(dtype: torch.dtype) -> tuple[str, str | None, list[int]]:
    """Stored name of a dtype, its own name if that is lost, and the dimension that adds."""
    stored, own = dtypes.torch_name(dtype)
    more = dtypes.has_extra_dim(stored, own, dtype.itemsize)
    return stored, own, [dtype.itemsize] if more else []


def tensor_node(dtype: torch.dtype, shape: Sequence[int]) -> dict[str, Any]:
    """The node that stands where a tensor stood."""
    stored, own, _ = extra_dim(dtype)
    content: dict[str, Any] = {"dtype": stored, "shape": [int(n) for n in shape]}
    if own is not None:
        content["own"] = own
    return {"~tensor": content}


def paths_of(metadata: Metadata) -> dict[str, Path]:
    """Where each name of the metadata lies in the state: as the planner flattened it, or flat."""
    names = list(metadata.state_dict_metadata)
    flat: dict[str, Path] = {name: (name,) for name in names}
    mapping = metadata.planner_data
    if not isinstance(mapping, dict) or not all(_is_path(mapping.get(name)) for name in names):
        return flat
    paths = {name: tuple(mapping[name]) for name in names}
    inner = {path[:i] for path in paths.values() for i in range(1, len(path))}
    if len(set(paths.values())) != len(paths) or inner & set(paths.values()):
        return flat
    if any(type(path[0]) is not str for path in paths.values()):
        return flat
    return paths


def _is_path(path: Any) -> bool:
    if not isinstance(path, tuple) or not path:
        return False
    return all(type(key) in (str, int) for key in path)


def state_json(metadata: Metadata, paths: dict[str, Path], nodes: dict[str, Any]) -> str:
    """The manifest's state: the nodes in a tree, and what DCP knows besides."""
    tree: dict[str, Any] = {}
    for name, path in paths.items():
        node = nodes[name]
        set_element(tree, path, None if node is None else Leaf(node))
    state = typed_json.encode(tree, _leaf)
    own = {
        "version": metadata.version,
        "planner_data": metadata.planner_data,
        "items": {name: _item(meta) for name, meta in metadata.state_dict_metadata.items()},
    }
    try:
        state[DCP] = typed_json.encode(own, None, (DCP,))
    except Unsupported as error:
        raise Unsupported(f"planner data of this kind has no stored form: {error}") from None
    return typed_json.dumps(state)


def _leaf(value: Any, _path: Path) -> Any:
    return value.node if isinstance(value, Leaf) else None


def _item(meta: Any) -> Any:
    if not isinstance(meta, TensorStorageMetadata):
        return None
    properties = meta.properties
    own: dict[str, Any] = {}
    if properties.requires_grad:
        own["requires_grad"] = True
    if properties.pin_memory:
        own["pin_memory"] = True
    if properties.layout is not torch.strided:
        own["layout"] = str(properties.layout).removeprefix("torch.")
    if properties.memory_format is not torch.contiguous_format:
        own["memory_format"] = str(properties.memory_format).removeprefix("torch.")
    if properties.strides is not None:
        own["strides"] = [int(n) for n in properties.strides]
    return own


def _properties(dtype: torch.dtype, own: dict[str, Any]) -> TensorProperties:
    if unknown := set(own) - set(_PROPERTIES):
        raise Corrupt(f"tensor properties of a newer version: {sorted(unknown)}")
    strides = own.get("strides")
    return TensorProperties(
        dtype=dtype,
        layout=getattr(torch, own.get("layout", "strided")),
        requires_grad=own.get("requires_grad", False),
        memory_format=_FORMATS[own.get("memory_format", "contiguous_format")],
        pin_memory=own.get("pin_memory", False),
        strides=None if strides is None else tuple(strides),
    )


class Stored:
    """What a folder holds, by DCP's names.

    Attributes:
        metadata: as DCP wants it.
        paths: name to the path of its chunks.
        dtypes: name to the dtype of a tensor.
        plain: name to the value of anything else, as a node of typed JSON or, for folders that a
            `Checkpointer` wrote, the value itself in a `Leaf`.
        foreign: names whose bytes are an archive nobody but torch reads, and their lengths.
    """

    def __init__(self, opened: Any, chunks: list[tuple]) -> None:
        self.metadata = Metadata({})
        self.paths: dict[str, str] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.plain: dict[str, Any] = {}
        self.foreign: dict[str, int] = {}
        self._chunks: dict[str, list[tuple]] = {}
        for row in chunks:
            self._chunks.setdefault(row[0], []).append(row)
        state = json.loads(opened.state_json())
        own = state.pop(DCP, None)
        if own is None:
            self._read_tree(state)
        else:
            self._read_own(state, typed_json.decode(own, None, (DCP,)))
        self.metadata.storage_meta = StorageMeta()
        self.metadata.storage_data = {
            MetadataIndex(name, chunk.offsets): (path,)
            for name, path in self.paths.items()
            if isinstance(meta := self.metadata.state_dict_metadata[name], TensorStorageMetadata)
            for chunk in meta.chunks
        }

    def _read_own(self, state: dict[str, Any], own: dict[str, Any]) -> None:
        self.metadata.version = own["version"]
        self.metadata.planner_data = own["planner_data"]
        self.metadata.state_dict_metadata = dict.fromkeys(own["items"])
        paths = paths_of(self.metadata)
        for name, item in own["items"].items():
            node = _node_at(state, paths[name])
            if typed_json.tag_of(node) == "tensor":
                self._add_tensor(name, paths[name], node["~tensor"], item)
            else:
                self._add_plain(name, node)

    def _read_tree(self, state: dict[str, Any]) -> None:
        """A folder of a `Checkpointer`: flattened as DCP would flatten what was saved."""
        state = {key: node for key, node in state.items() if not _is_own(key)}
        placed: dict[int, tuple[Path, dict[str, Any]]] = {}

        def leaf(tag: str, content: Any, path: Path) -> Any:
            if tag == "tensor":
                try:
                    dtype = dtypes.torch_dtype(content["dtype"], content.get("own"))
                except (KeyError, TypeError):  # a numpy dtype that torch does not have
                    return Leaf({"~tensor": content})
                stand_in = torch.empty(content["shape"], dtype=dtype, device="meta")
                placed[id(stand_in)] = (tuple(content.get("at", path)), content)
                return stand_in
            # a value per rank or a pickle: not DCP's to load, but its name is there
            return Leaf({"~" + tag: content})

        tree = {
            typed_json.decode_key(key): typed_json.decode(node, leaf, (typed_json.decode_key(key),))
            for key, node in state.items()
        }
        flat, mapping = flatten_state_dict(tree)
        self.metadata.planner_data = mapping
        for name, value in flat.items():
            if isinstance(value, torch.Tensor):
                path, content = placed[id(value)]
                self._add_tensor(name, path, content, {})
            elif not isinstance(value, Leaf):
                self._add_plain(name, Leaf(value))

    def _add_plain(self, name: str, node: Any) -> None:
        self.plain[name] = node
        self.metadata.state_dict_metadata[name] = BytesStorageMetadata()

    def _add_tensor(self, name: str, path: Path, content: dict[str, Any], item: Any) -> None:
        self.paths[name] = typed_json.path_json(path)
        if content.get(FOREIGN):
            self.foreign[name] = int(content["shape"][0])
            self.metadata.state_dict_metadata[name] = BytesStorageMetadata()
            return
        dtype = dtypes.torch_dtype(content["dtype"], content.get("own"))
        shape = torch.Size(content["shape"])
        chunks = [
            ChunkStorageMetadata(torch.Size(row[4][: len(shape)]), torch.Size(row[5][: len(shape)]))
            for row in self._chunks.get(self.paths[name], [])
        ]
        self.dtypes[name] = dtype
        self.metadata.state_dict_metadata[name] = TensorStorageMetadata(
            _properties(dtype, item or {}), shape, chunks
        )


def _is_own(key: str) -> bool:
    """True for what the Checkpointer adds to a state (``~rng``), False for a user's keys."""
    return len(key) > 1 and key[0] == "~" and key[1].isalpha()


def _node_at(state: Any, path: Path) -> Any:
    node = state
    for key in path:
        try:
            node = node[key if isinstance(node, list) else typed_json.encode_key(key, path)]
        except (LookupError, TypeError) as error:
            where = typed_json.format_path(path)
            raise Corrupt(f"{where}: named by the planner, but not in the state: {error}") from None
    return node
