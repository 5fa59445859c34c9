"""The data loader: batches in an order that survives restarts, ranks and batch sizes."""

from __future__ import annotations

import importlib.util
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from drivetrain import _native
from drivetrain._batch import Maker, NumpyMaker, TorchMaker, make_batch
from drivetrain._checkpoint.durations import seconds
from drivetrain._ranks import resolve_rank
from drivetrain._requests import native_fields
from drivetrain._sizes import integer, size_bytes

if TYPE_CHECKING:
    from drivetrain._dataset import Dataset

#: Seeds are unsigned 64-bit numbers.
SEED_MAX = 2**64 - 1

_SHUFFLES = {True: "full", False: "sequential", "full": "full", "block": "block"}


class DataLoader:
    """Loads batches of a data set.

    Iterating yields one dict per step with the requested fields, `key` (list of B str) and
    `_valid` (B,) bool: False for the padding that fills the last step of an epoch and for masked
    samples. The order is a function of (seed, epoch, position) alone, so a state restored into
    another number of ranks, another batch size or another number of threads continues with exactly
    the samples that are left.

    Args:
        ds: From `drivetrain.open`.
        batch_size: Samples per batch of this rank.
        fields: `{name: dt.Image(...) | dt.Points(...) | None}`; a field with None, every field of
            a list of names, and with fields=None every field of the data set comes in its natural
            form; `{}` is none: just `key` and `_valid`. Natural forms in a batch:

            - pictures: (B, H, W, 3) uint8, or a list of arrays if their sizes differ;
            - points: (ΣN, C) float32 with `<field>_offsets` (B + 1,) int64;
            - boxes: (ΣN, 7) float32 with `_offsets`, `_velocity` (ΣN, 3) float32,
              `_lidar_points` (ΣN,) int32, and lists of B lists `_names` and `_token`;
            - poses: (B, 4, 4) float64 (frames are the field's, see `ds.fields`);
            - calibrations: list of `Calibration`; numbers: (B,) float64; text: list of str;
            - arrays: list; bytes without a decoder: list of read-only memoryviews.

        shuffle: True or "full" (a permutation of all samples), "block" or
            ("block", samples per block, blocks per window), or False (index order).
        seed: Seed of the order.
        drop_last: Drop the tail that does not fill a step on all ranks, instead of padding it by
            wrapping around.
        rank: This rank of data parallelism; with `world_size`, or neither.
        world_size: Number of data-parallel ranks.
        mesh: A DeviceMesh to take them from; ranks along other dimensions than `dp_dims` get the
            same samples.
        dp_dims: Names of the data-parallel dimensions of `mesh`.
        device: Where tensors go: None, "cpu" or a CUDA device.
        memory_limit: Bytes of all buffers, batches that you hold included ("2GiB" or an int).
        threads: Decoder threads; None is one per available core.
        on_error: What to do with a sample that cannot be read: "raise", "replace" (by the sample
            at the next position of the epoch's order that can be read) or "mask" (zeros,
            `_valid` False).
        on_held: When all memory is in batches you hold: "copy" (further ones lie outside the
            limit, with one warning) or "raise" `MemoryHeld`.
        augment: Only None so far.
        timeout: Longest wait for one batch ("30s" or seconds); None waits as long as reads, each
            of which has a deadline of its own, may take.
        output: "torch", "numpy", or None for torch if it can be imported.
        on_error_limit: Bad samples before an error is raised after all: a count (int), or a share
            of the samples (float from 0.0 to 1.0).
        quarantine: A file that each bad sample is appended to as a line of JSON.
    """

    def __init__(
        self,
        ds: Dataset,
        batch_size: int,
        *,
        fields: Mapping[str, Any] | Sequence[str] | None = None,
        shuffle: bool | str | tuple[str, int, int] = False,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: Any = None,
        dp_dims: Sequence[str] = ("dp",),
        device: Any = None,
        memory_limit: str | int = "2GiB",
        threads: int | None = None,
        on_error: str = "raise",
        on_held: str = "copy",
        augment: None = None,
        timeout: str | float | None = None,
        output: str | None = None,
        on_error_limit: int | float = 1000,
        quarantine: str | os.PathLike[str] | None = None,
    ) -> None:
        if augment is not None:
            raise _native.Unsupported(
                f"augment={augment!r} is not supported: this version has no augmentations; "
                "leave it None and augment the batch"
            )
        rank, world_size = resolve_rank(rank, world_size, mesh, dp_dims)
        self._output = _output(output, device)
        self._device = device
        options = {
            "batch_size": integer(batch_size, "batch_size", 1),
            "fields": native_fields(fields),
            "seed": integer(seed, "seed", 0, SEED_MAX),
            "drop_last": bool(drop_last),
            "rank": rank,
            "world_size": world_size,
            "memory_limit_bytes": size_bytes(memory_limit, "memory_limit"),
            "threads": None if threads is None else integer(threads, "threads", 1),
            "on_error": on_error,
            "on_held": on_held,
            "timeout_s": None if timeout is None else seconds(timeout, "timeout"),
            "quarantine_file": None if quarantine is None else os.fspath(quarantine),
            **_shuffle(shuffle),
            **_limit(on_error_limit),
        }
        self._start(ds, options)

    def _start(self, ds: Dataset, options: dict[str, Any]) -> None:
        self._ds = ds
        self._options = options
        self._native = _native.Loader(ds._native, options)
        self._maker: Maker | None = None
        self._warned = False

    def _tensors(self) -> Maker:
        if self._maker is None:
            torch = self._output == "torch"
            maker = TorchMaker(self._device) if torch else NumpyMaker()
            forms = [form for _, form in self._options["fields"] or [] if form]
            maker.check({form["dtype"] for form in forms if "dtype" in form})
            self._maker = maker
        return self._maker

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Starts a pass; iterators from before raise from now on."""
        return self._iterate(0, 1)

    def _iterate(self, first: int, stride: int) -> Iterator[dict[str, Any]]:
        # In this order the engine makes the first steps while torch is being imported.
        running = self._native.begin(first, stride)
        return _Iterator(self, running, self._tensors())

    def __len__(self) -> int:
        """Steps of the current pass, or of the next one, from its start to the epoch's end."""
        return len(self._native)

    @property
    def dataset(self) -> Dataset:
        """The data set."""
        return self._ds

    @property
    def batch_size(self) -> int:
        """Samples per batch of this rank."""
        return self._options["batch_size"]

    @property
    def rank(self) -> int:
        """This rank of data parallelism."""
        return self._options["rank"]

    @property
    def world_size(self) -> int:
        """Number of data-parallel ranks."""
        return self._options["world_size"]

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands: batches handed out, not prefetched ones; equal on all ranks."""
        return json.loads(self._native.state())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues from a stored state; another seed, shuffle or data set is refused by name."""
        try:
            state = dict(state_dict)
            text = json.dumps(state)
        except (TypeError, ValueError) as error:
            raise _native.InvalidArgument(
                f"loader state: expected the dict that state_dict() returned, found {error}"
            ) from None
        for name in ("epoch", "position"):
            if name in state:
                integer(state[name], f"loader state: {name}", 0)
        self._native.load_state(text)

    def set_epoch(self, epoch: int) -> None:
        """Moves to `epoch` from its start; the current epoch keeps its position."""
        self._native.set_epoch(integer(epoch, "epoch", 0))

    def stats(self) -> dict[str, Any]:
        """Counts, bytes, seconds per stage, reads by engine, memory, and the bottleneck's name."""
        return self._native.stats()

    def quarantine(self) -> list[dict[str, Any]]:
        """Bad samples so far: key, field, source, offset, reason, and what was done."""
        return self._native.quarantine()

    def close(self) -> None:
        """Stops reading and joins the threads. Batches that you hold stay valid."""
        self._native.close()

    def __enter__(self) -> DataLoader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _warn_copied(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                "memory_limit is full of batches that are still held; further batches are copied "
                "to private memory outside the limit. Drop batches, raise memory_limit, or choose "
                'on_held="raise".',
                ResourceWarning,
                stacklevel=4,
            )

    def __reduce__(self) -> tuple:
        arguments = (self._ds, self._options, self._output, self._device, self._native.state())
        return _rebuild, arguments


class _Iterator(Iterator[dict[str, Any]]):
    """One pass; raises once a newer one has started."""

    def __init__(self, loader: DataLoader, running: Any, maker: Maker) -> None:
        self._loader = loader
        self._running = running
        self._maker = maker

    def __next__(self) -> dict[str, Any]:
        raw = self._loader._native.next(self._running)
        if raw is None:
            raise StopIteration
        if raw[4]:
            self._loader._warn_copied()
        return make_batch(raw, self._maker)


def _rebuild(
    ds: Dataset, options: dict[str, Any], output: str, device: Any, state: str
) -> DataLoader:
    loader = DataLoader.__new__(DataLoader)
    loader._output, loader._device = output, device
    loader._start(ds, options)
    loader._native.load_state(state)
    return loader


def _output(output: str | None, device: Any) -> str:
    if output not in (None, "torch", "numpy"):
        raise _native.InvalidArgument(f"output: expected torch, numpy or None, found {output!r}")
    chosen = output or ("torch" if importlib.util.find_spec("torch") else "numpy")
    if chosen == "numpy" and device is not None and str(device) != "cpu":
        raise _native.InvalidArgument(f'device: expected None with output="numpy", found {device}')
    return chosen


def _shuffle(shuffle: Any) -> dict[str, Any]:
    numbers = None
    if isinstance(shuffle, (tuple, list)) and len(shuffle) == 3:
        shuffle, *numbers = shuffle
    name = _SHUFFLES.get(shuffle) if isinstance(shuffle, (bool, str)) else None
    if name is None or (numbers and name != "block"):
        raise _native.InvalidArgument(
            'shuffle: expected True, False, "full", "block" or ("block", block, window), '
            f"found {shuffle!r}"
        )
    return {"shuffle": name, "shuffle_block": None if numbers is None else tuple(numbers)}


def _limit(limit: int | float) -> dict[str, Any]:
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or limit < 0:
        raise _native.InvalidArgument(
            f"on_error_limit: expected a count, or a rate from 0.0 to 1.0, found {limit!r}"
        )
    if isinstance(limit, int):
        return {"error_count": limit, "error_rate": None}
    return {"error_count": None, "error_rate": limit}
