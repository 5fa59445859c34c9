"""Data sets: a table of samples, and each sample in its natural form."""

from __future__ import annotations

import hashlib
import operator
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drivetrain import _native
from drivetrain._values import wrap

if TYPE_CHECKING:
    import pyarrow

_HEAD = ("key", "scene", "timestamp_ns")


@dataclass(frozen=True)
class Field:
    """One field of a data set.

    Attributes:
        name: Its name in samples and batches.
        kind: "image", "points", "boxes", "pose", ...: what it means.
        frame: Frame of its geometry, if it has one.
        columns: Names of the columns of a point record.
        extra: What else the format says, for example which instant a time stamp means.
    """

    name: str
    kind: str
    frame: str | None
    columns: tuple[str, ...]
    extra: Mapping[str, str]


class Row(Mapping[str, Any]):
    """One sample, each field read when it is first looked at."""

    def __init__(self, native: Any, index: int) -> None:
        self._native = native
        self._index = index
        self._values: dict[str, Any] = dict(zip(_HEAD, native.head(index)))

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            if name not in self._names():
                raise KeyError(name)
            self._values[name] = wrap(self._native.sample(self._index, [name])[name])
        return self._values[name]

    def _names(self) -> list[str]:
        return [field[0] for field in self._native.fields()]

    def __iter__(self) -> Iterator[str]:
        yield from _HEAD
        yield from self._names()

    def __len__(self) -> int:
        return len(_HEAD) + len(self._names())


class Dataset:
    """Samples of a data set in index order.

    Made by `drivetrain.open`. `ds[i]` is a dict with `key` (str), `scene` (str), `timestamp_ns`
    (int) and every field in its natural form: images (H, W, 3) uint8 RGB, depth (H, W) uint16,
    `PointCloud`, `Boxes`, `Pose`, `Calibration`, text, numbers, arrays, and bytes where no decoder
    exists; None where the sample has none.

    A Dataset can be pickled: it travels as the paths of its index and the rows of a selection,
    together with its storage options.
    """

    def __init__(self, native: Any) -> None:
        self._native = native

    def __len__(self) -> int:
        return len(self._native)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return self._select(range(*index.indices(len(self))))
        row = self._row(index)
        key, scene, timestamp_ns = self._native.head(row)
        values = {name: wrap(raw) for name, raw in self._native.sample(row).items()}
        return {"key": key, "scene": scene, "timestamp_ns": timestamp_ns, **values}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[i] for i in range(len(self)))

    def _row(self, index: int) -> int:
        number, count = operator.index(index), len(self)
        if not -count <= number < count:
            raise IndexError(f"sample {number} of a data set of {count}")
        return number % count

    def row(self, index: int) -> Row:
        """The sample at `index` as a mapping that reads a field when it is first looked at."""
        return Row(self._native, self._row(index))

    def find(self, key: str) -> int:
        """Index of the sample with this key; KeyError if there is none."""
        row = self._native.find(key)
        if row is None:
            raise KeyError(key)
        return row

    @property
    def fields(self) -> dict[str, Field]:
        """Field by name, in the order of the table's columns."""
        described = self._native.fields()
        return {f[0]: Field(f[0], f[1], f[2], tuple(f[3]), dict(f[4])) for f in described}

    @property
    def fingerprint(self) -> str:
        """32 hex digits over keys, fields and byte ranges; a selection has its own."""
        return self._native.fingerprint

    @property
    def root(self) -> str:
        """URI below which the sources lie."""
        return self._native.root

    @property
    def format(self) -> str:
        """Name of the format that was indexed."""
        return self._native.format

    @property
    def table(self) -> pyarrow.Table:
        """The sample table as a pyarrow.Table, without a copy (a selection is gathered once)."""
        import pyarrow

        return pyarrow.table(self._native)

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self._native.__arrow_c_stream__(requested_schema)

    def filter(self, condition: Any) -> Dataset:
        """The samples that a condition picks, as a Dataset that shares the index.

        Args:
            condition: One of

                - a boolean mask with one entry per sample (list, numpy, torch, Arrow),
                - a sequence of indices, which also orders and may repeat,
                - an expression of pyarrow.compute or polars over the table's columns,
                - a callable that takes a `Row` and returns a truth value.
        """
        if _is_expression(condition, "polars", "Expr"):
            return self._select(self._rows_of_polars(condition))
        if _is_expression(condition, "pyarrow", "Expression"):
            return self._select(self._rows_of_arrow(condition))
        if callable(condition):
            return self._select(self._rows_of_callable(condition))
        return self._select(self._rows_of_array(condition))

    def _select(self, rows: Sequence[int]) -> Dataset:
        return Dataset(self._native.select(list(rows)))

    def _rows_of_callable(self, condition: Callable[[Row], Any]) -> list[int]:
        return [i for i in range(len(self)) if condition(self.row(i))]

    def _rows_of_polars(self, expression: Any) -> list[int]:
        import polars

        frame = polars.DataFrame(self._native).with_row_index("_row")
        return frame.filter(expression)["_row"].to_list()

    def _rows_of_arrow(self, expression: Any) -> list[int]:
        import pyarrow

        rows = pyarrow.array(range(len(self)), pyarrow.uint64())
        return self.table.append_column("_row", rows).filter(expression)["_row"].to_pylist()

    def _rows_of_array(self, condition: Any) -> list[int]:
        import numpy as np

        array = np.asarray(condition)
        if array.ndim != 1:
            raise _native.InvalidArgument(
                f"filter: expected a mask, indices, an expression or a callable, "
                f"found an array of shape {array.shape}"
            )
        if array.dtype == bool:
            if len(array) != len(self):
                raise _native.InvalidArgument(
                    f"filter: expected a mask of {len(self)} entries, found {len(array)}"
                )
            return np.flatnonzero(array).tolist()
        if array.size and array.dtype.kind not in "iu":
            raise _native.InvalidArgument(
                f"filter: expected booleans or integers, found {array.dtype}"
            )
        return [self._row(i) for i in array.tolist()]

    def __reduce__(self) -> tuple:
        native = self._native
        if native.index_path is None:
            raise TypeError("this data set has no index file; give drivetrain.open an index=")
        arguments = (
            os.path.abspath(native.index_path),
            native.root,
            native.storage_options or None,
            native.rows,
            native.fingerprint,
        )
        return _reopen, arguments

    def __repr__(self) -> str:
        return f"Dataset({len(self)} samples of {self.format} at {self.root})"


def _is_expression(value: Any, package: str, name: str) -> bool:
    kind = type(value)
    return kind.__module__.partition(".")[0] == package and kind.__name__ == name


def _reopen(
    index: str,
    root: str,
    storage_options: dict[str, str] | None,
    rows: list[int] | None,
    fingerprint: str,
) -> Dataset:
    native = _native.open_index(index, root, storage_options)
    if rows is not None:
        native = native.select(rows)
    if native.fingerprint != fingerprint:
        raise _native.SourceChanged(
            f"{index} changed since the data set was pickled: expected fingerprint "
            f"{fingerprint}, found {native.fingerprint}; open the data set again"
        )
    return Dataset(native)


def open(
    uri: str | os.PathLike[str],
    format: str = "auto",
    index: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> Dataset:
    """Opens a data set; the first time its index is built, later it is mapped.

    Args:
        uri: A data set (a folder, an archive, an info file), local or on an object store, or an
            index file `<name>.index.arrow`.
        format: "auto", or the name of a format (see docs/formats.md).
        index: Index file to use; made there if it is missing or out of date.
        cache: Folder for indexes that have no file of their own; by default a folder
            `drivetrain` in the user's cache folder.
        storage_options: Options of the object store, as object_store spells them.

    Raises:
        NotFound: there is nothing, or nothing that is known, at `uri`.
        Corrupt: the data set's own tables are damaged; the message names file and place.
    """
    location = os.fspath(uri)
    if index is None and cache is not None and not location.endswith(".index.arrow"):
        index = _cached_index(location, format, cache)
    options = dict(storage_options) if storage_options else None
    path = None if index is None else os.fspath(index)
    return Dataset(_native.open_dataset(location, format, path, options))


def _cached_index(location: str, format: str, cache: str | os.PathLike[str]) -> str:
    where = location if "://" in location else os.path.abspath(location)
    name = hashlib.sha256(f"{format} {where}".encode()).hexdigest()[:32]
    folder = pathlib.Path(cache)
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder / f"{name}.index.arrow")


def index(
    uri: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    format: str = "auto",
    storage_options: Mapping[str, str] | None = None,
) -> Dataset:
    """Builds the index of a data set anew and returns the data set.

    Args:
        uri: A data set, local or on an object store.
        out: Where to write the index, `<name>.index.arrow`; None keeps it in memory, and such a
            Dataset cannot be pickled.
        format: "auto", or the name of a format (see docs/formats.md).
        storage_options: Options of the object store, as object_store spells them.
    """
    path = None if out is None else os.fspath(out)
    options = dict(storage_options) if storage_options else None
    return Dataset(_native.build_index(os.fspath(uri), path, format, options))
