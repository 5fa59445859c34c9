"""Which elements of a DTensor a rank holds: ranges per dimension, from mesh and placements alone.

`Shard` cuts as ``torch.chunk`` does: equal parts, the last one shorter, then empty ones. Several
mesh dimensions that shard one tensor dimension cut one after the other. `_StridedShard` says that
its cut came after those of mesh dimensions further right, as ``fully_shard`` of a tensor-parallel
module makes it. Torch reads that in two ways that differ for uneven sizes:

* in the order of the cuts, which is what fully sharded parameters really hold: one range;
* from left to right, what ``distribute_tensor`` makes: cut into ``split_factor`` parts, cut each of
  those, keep one piece of every part: several ranges.

Where both give one size they give the same ranges, or `local_ranges` does not decide: with 27 rows
on 4 by 3 ranks torch itself takes row 20 for row 26.
"""

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

#: (start, length) along one dimension, ascending and not touching
Ranges = list[tuple[int, int]]
#: split factor, parts, index of the part; in the order of mesh dimensions
Cuts = list[tuple[int, int, int]]


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and length of a part of ``torch.chunk``."""
    most = -(-size // parts)
    start = min(index * most, size)
    return start, min(most, size - start)


def in_order(size: int, cuts: Cuts) -> Ranges | None:
    """The range when strided cuts come after those on their right; None for other factors."""
    order: Cuts = []
    for factor, parts, index in reversed(cuts):
        before = next((n for n in range(len(order) + 1) if _parts(order[:n]) == factor), None)
        if before is None:
            return None
        order.insert(before, (1, parts, index))
    return left_to_right(size, order)


def left_to_right(size: int, cuts: Cuts) -> Ranges:
    """The ranges when cuts are made in the order of mesh dimensions."""
    ranges = [(0, size)]
    for factor, parts, index in cuts:
        total = sum(length for _, length in ranges)
        picks = []
        for block in range(factor):
            start, length = chunk(total, factor, block)
            if length == 0:
                break
            first, count = chunk(length, parts, index)
            picks.append((start + first, count))
        ranges = _select(ranges, picks)
    return ranges


def _parts(cuts: Cuts) -> int:
    return prod(parts for _, parts, _ in cuts)


def _select(ranges: Ranges, picks: Ranges) -> Ranges:
    """Positions among the elements of `ranges` as ranges of the whole dimension."""
    found: Ranges = []
    for start, count in picks:
        passed = 0
        for low, length in ranges:
            first = max(start - passed, 0)
            last = min(start + count - passed, length)
            if first < last:
                if found and sum(found[-1]) == low + first:
                    found[-1] = (found[-1][0], found[-1][1] + last - first)
                else:
                    found.append((low + first, last - first))
            passed += length
    return found


def local_ranges(size: int, cuts: Cuts, local_size: int) -> Ranges | None:
    """The ranges of a dimension that this rank holds; None when no reading fits its local size."""
    readings = [left_to_right(size, cuts)]
    if any(factor > 1 for factor, _, _ in cuts):
        ordered = in_order(size, cuts)
        readings += [] if ordered is None else [ordered]
    fitting = [r for r in readings if sum(length for _, length in r) == local_size]
    if not fitting or any(r != fitting[0] for r in fitting):
        return None
    return fitting[0]


def cuts_of(
    ndim: int, mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]
) -> list[Cuts]:
    """The cuts of each tensor dimension."""
    cuts: list[Cuts] = [[] for _ in range(ndim)]
    for parts, index, placement in zip(mesh_shape, coordinate, placements):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            factor = int(getattr(placement, "split_factor", 1))
            cuts[dim].append((factor, int(parts), int(index)))
    return cuts


def in_shard_order(cuts: list[Cuts], placements: Sequence[Any], order: Any) -> list[Cuts]:
    """The cuts of each tensor dimension in an order that torch keeps beside plain placements."""
    places: list[list[int]] = [[] for _ in cuts]
    for at, placement in enumerate(placements):
        if getattr(placement, "dim", None) is not None:
            places[placement.dim].append(at)
    sorted_cuts = list(cuts)
    for entry in order:
        dim, mesh_dims = entry.tensor_dim, entry.mesh_dims
        by_place = dict(zip(places[dim], cuts[dim]))
        sorted_cuts[dim] = [by_place[at] for at in mesh_dims]
    return sorted_cuts


def boxes(ranges: Sequence[Ranges]) -> list[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Each rectangle of a local part: its offsets in the whole, and where it lies in the part."""
    dims = []
    for one in ranges:
        at, found = 0, []
        for start, length in one:
            found.append((start, slice(at, at + length)))
            at += length
        dims.append(found)
    return [(tuple(s for s, _ in box), tuple(i for _, i in box)) for box in product(*dims)]
