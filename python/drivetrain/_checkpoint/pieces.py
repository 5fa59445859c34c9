"""A tensor of any kind as the ranges of it that this rank holds, and who else holds them.

`describe` is the one place that knows torch tensors, DTensors, `Sharded` parts and numpy arrays;
the save and the restore see only its answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from drivetrain._checkpoint import dtypes, spread
from drivetrain._checkpoint.typed_json import Path, format_path, refuse
from drivetrain._checkpoint.values import Sharded
from drivetrain._native import InvalidArgument

META_ADVICE = "a meta tensor has no elements: give the module itself, or to_empty() it first"

#: Mesh dimensions along which ranks hold different layers, so that a tensor on the others is not
#: repeated along these.
STAGE_DIMS = ("pp", "pipeline", "stage")


@dataclass
class Part:
    """One rectangle, or one range of the flattened tensor, that this rank holds."""

    local: Any
    """Its elements: a view of the local part."""
    offsets: tuple[int, ...]
    """Index of its first element in the whole; of the flattened tensor for a flat range."""
    extent: tuple[int, ...]
    """Elements per dimension; as many as `offsets`."""

    def range_in(
        self, shape: Sequence[int], extra_dim: int | None
    ) -> tuple[list[int], list[int], list[int]]:
        """Shape of the whole, offsets and extent as stored.

        `extra_dim` is the number of U8 that one element is stored as, along one more dimension.
        """
        whole, offsets, extent = list(shape), list(self.offsets), list(self.extent)
        if extra_dim is not None:
            flat = len(offsets) != len(whole)
            whole.append(extra_dim)
            if flat:
                offsets, extent = [offsets[0] * extra_dim], [extent[0] * extra_dim]
            else:
                offsets, extent = [*offsets, 0], [*extent, extra_dim]
        return whole, offsets, extent


@dataclass
class Place:
    """Where the local part of a tensor lies in the whole."""

    local: Any
    """The torch tensor or numpy array with this rank's elements."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offsets: tuple[int, ...]
    """Index of the local part's first element."""
    replicas: tuple[int, ...] | None
    """Ranks with an identical part, ascending; None: every rank."""
    here: bool = True
    """False when this rank holds no element of it."""
    whole: bool = True
    """True when the local part is the whole tensor."""
    split: list[Part] | None = None
    """The rectangles of a local part that is not one, as strided sharding makes it."""

    @property
    def extent(self) -> tuple[int, ...]:
        """Shape of the local part."""
        return self.shape if self.whole else tuple(int(n) for n in self.local.shape)

    @property
    def parts(self) -> list[Part]:
        """The ranges that this rank holds; none if it has no element."""
        if not self.here:
            return []
        return self.split or [Part(self.local, self.offsets, self.extent)]


def describe(value: Any, rank: int, world_size: int, path: Path) -> Place | None:
    """The place of a tensor-like value, None for anything else.

    Raises `Unsupported` for tensors without plain elements (sparse, meta, nested, quantized, lazy
    ones and tensor subclasses that wrap others), `InvalidArgument` for a mesh that does not fit.
    """
    if is_plain(value):
        return Place(value.detach(), tuple(value.shape), (0,) * value.dim(), None)
    if isinstance(value, Sharded):
        return _of_sharded(value, rank, world_size, path)
    if dtypes.is_array(value):
        if dtypes.is_masked(value):
            raise refuse(value, path, "store its data and its mask as two arrays")
        return Place(value, tuple(value.shape), (0,) * value.ndim, None)
    if not dtypes.is_tensor(value):
        return None
    if is_dtensor(value):
        return _of_dtensor(value, world_size, path)
    check_plain(value, path)
    return Place(value.detach(), tuple(value.shape), (0,) * value.dim(), None)


def is_plain(value: Any) -> bool:
    """True for tensors that certainly have plain elements: the usual ones, at little cost."""
    return (
        dtypes.loaded("torch") is not None
        and type(value) in dtypes.plain_classes()
        and (value.is_cpu or value.is_cuda)
        and value.layout is _strided()
        and not value.is_nested
        and not value.is_quantized
    )


@cache
def _strided() -> Any:
    import torch

    return torch.strided


def is_dtensor(value: Any) -> bool:
    """True for DTensors; their module is there if one exists."""
    module = dtypes.loaded("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def check_plain(value: Any, path: Path) -> None:
    """Refuses tensors whose elements are not plainly in memory."""
    import torch
    from torch.nn.parameter import is_lazy
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if is_lazy(value):
        raise refuse(value, path, "run one forward pass so that the lazy parameter gets its shape")
    if value.layout is not torch.strided or value.is_nested:
        raise refuse(value, path, f"a tensor of layout {value.layout}: store value.to_dense()")
    if value.device.type == "meta":
        raise refuse(value, path, META_ADVICE)
    if value.is_quantized:
        raise refuse(value, path, "store value.int_repr() with its scale and zero point")
    if is_traceable_wrapper_subclass(value):
        raise refuse(value, path, "a tensor subclass that wraps others: store its inner tensors")


def _of_sharded(value: Sharded, rank: int, world_size: int, path: Path) -> Place:
    inner = describe(value.tensor, rank, world_size, path)
    if inner is None or isinstance(value.tensor, Sharded) or is_dtensor(value.tensor):
        raise refuse(value.tensor, path, "Sharded takes a plain torch tensor or numpy array")
    replicas = tuple(sorted(value.replicas)) if value.replicas is not None else (rank,)
    if rank not in replicas or replicas[0] < 0 or replicas[-1] >= world_size:
        raise InvalidArgument(
            f"{format_path(path)}: Sharded.replicas: expected ranks below {world_size} with "
            f"this rank {rank} among them, found {replicas}"
        )
    here = 0 not in inner.extent or 0 in value.global_shape
    if value.flat_start is not None and len(value.global_shape) != 1:
        return Place(
            inner.local, value.global_shape, (value.flat_start,), replicas, here, whole=False
        )
    whole = inner.extent == value.global_shape
    return Place(inner.local, value.global_shape, value.offsets, replicas, here, whole)


def _of_dtensor(value: Any, world_size: int, path: Path) -> Place:
    mesh, placements = value.device_mesh, value.placements
    for placement in placements:
        if placement.is_partial():
            raise refuse(value, path, "a Partial placement: redistribute() it first")
        if not placement.is_replicate() and not hasattr(placement, "dim"):
            raise refuse(value, path, f"a placement {placement}: redistribute() it first")
    highest = int(mesh.mesh.max())
    if highest >= world_size:
        raise InvalidArgument(
            f"{format_path(path)}: its mesh has rank {highest} but the Checkpointer was "
            f"made for {world_size} ranks; give it the rank and world_size of the process group"
        )
    local = value.to_local().detach()
    if local.device.type == "meta":
        raise refuse(value, path, META_ADVICE)
    shape = tuple(int(n) for n in value.shape)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return Place(local, shape, (0,) * len(shape), None, here=False, whole=False)
    replicas = _replicas(mesh, coordinate, placements)
    if tuple(local.shape) == shape:
        return Place(local, shape, (0,) * len(shape), replicas)
    return _spread(value, local, shape, coordinate, replicas, path)


def _spread(
    value: Any,
    local: Any,
    shape: tuple[int, ...],
    coordinate: Sequence[int],
    replicas: tuple[int, ...],
    path: Path,
) -> Place:
    """The place of a DTensor's local part that is not the whole."""
    mesh, placements, spec = value.device_mesh, value.placements, value._spec
    cuts = spread.cuts_of(len(shape), mesh.mesh.shape, coordinate, placements)
    if getattr(spec, "use_strided_shard_as_shard_order", True) is False and spec.shard_order:
        cuts = spread.in_shard_order(cuts, placements, spec.shard_order)
    if 0 in local.shape:
        return Place(local, shape, (0,) * len(shape), replicas, here=0 in shape, whole=False)
    ranges = []
    for dim, size in enumerate(shape):
        found = spread.local_ranges(size, cuts[dim], int(local.shape[dim]))
        if found is None:
            raise refuse(
                value,
                path,
                f"placements {tuple(placements)} do not say which {int(local.shape[dim])} of "
                f"{size} in dimension {dim} this rank holds; make {size} a multiple of the ranks "
                "that share it",
            )
        ranges.append(found)
    boxes = spread.boxes(ranges)
    if len(boxes) == 1:
        return Place(local, shape, boxes[0][0], replicas, whole=False)
    split = [
        Part(local[inside], offsets, tuple(one.stop - one.start for one in inside))
        for offsets, inside in boxes
    ]
    return Place(local, shape, boxes[0][0], replicas, whole=False, split=split)


def sharded_like(value: Any, dtype: Any) -> Any:
    """A new DTensor of another dtype with the mesh, placements and device of a given one."""
    import torch
    from torch.distributed.tensor import DTensor

    local = value.to_local()
    device = "cpu" if local.device.type == "meta" else local.device
    empty = torch.empty_like(local, dtype=dtype, device=device, requires_grad=False)
    return DTensor.from_local(
        empty,
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )


def replica_ranks(ranks: Any, coordinate: Sequence[int], placements: Any) -> tuple[int, ...]:
    """Ranks of a mesh that hold the same part: those that differ only in replicated dimensions."""
    return _same(ranks, [None if p.is_replicate() else c for c, p in zip(coordinate, placements)])


def _replicas(mesh: Any, coordinate: Sequence[int], placements: Any) -> tuple[int, ...]:
    """The same in the mesh that this one was cut out of.

    The tensor-parallel part of a mesh of data and tensor parallelism is repeated along the other
    dimensions, save those of pipeline stages.
    """
    root, names = _root_mesh(mesh), mesh.mesh_dim_names
    here = root.get_coordinate()
    if root is mesh or here is None or not set(names or ()) < set(root.mesh_dim_names or ()):
        return replica_ranks(mesh.mesh, coordinate, placements)
    fixed: dict[str, int | None] = {
        name: int(at) if name in STAGE_DIMS else None for name, at in zip(root.mesh_dim_names, here)
    }
    for name, at, placement in zip(names, coordinate, placements):
        fixed[name] = None if placement.is_replicate() else int(at)
    return _same(root.mesh, list(fixed.values()))


def _same(ranks: Any, fixed: list[int | None]) -> tuple[int, ...]:
    chosen = ranks[tuple(slice(None) if at is None else int(at) for at in fixed)]
    return tuple(sorted(int(n) for n in chosen.flatten().tolist()))


def _root_mesh(mesh: Any) -> Any:
    """The mesh that a mesh was cut out of, itself if none, or if this torch does not tell."""
    of = getattr(mesh, "_get_root_mesh", None)
    return of() if of is not None else mesh


def identity(place: Place) -> tuple[Any, ...]:
    """Equal for two values that are the same elements of the same memory (tied tensors).

    Holds while both are alive. The storage object is compared and not its address, since empty
    parts of sharded tensors all have address 0.
    """
    local = place.local
    if dtypes.is_array(local):
        at = local.__array_interface__["data"][0] if local.size else id(local)
        return ("numpy", at, local.dtype.str, place.shape, place.offsets, local.strides)
    storage = local.untyped_storage()._cdata
    start, strides = local.storage_offset(), local.stride()
    return ("torch", storage, start, local.dtype, place.shape, place.offsets, place.extent, strides)


def dense_strides(tensor: Any) -> tuple[int, ...] | None:
    """The strides of a tensor that is dense in another order (channels last), else None."""
    if tensor.is_contiguous() or tensor.numel() < 2:
        return None
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size != 1:
            if stride != expected:
                return None
            expected *= size
    return tuple(tensor.stride())


def contiguous_cpu(local: Any) -> Any:
    """The same elements row-major in CPU memory; the tensor itself where it already is."""
    if dtypes.is_array(local):
        import numpy

        return numpy.ascontiguousarray(local).reshape(local.shape)
    tensor = local.detach()
    # a conjugated view claims to be contiguous while its bytes are not yet conjugated
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor.cpu().contiguous()


def copied(local: Any) -> Any:
    """The same elements row-major in CPU memory of their own."""
    same = contiguous_cpu(local)
    if dtypes.is_array(local):
        return same.copy()
    return same.clone() if same.data_ptr() == local.data_ptr() else same


def storage(tensor: Any) -> int:
    """Equal for tensors of the same memory while both are alive."""
    local = tensor.to_local() if is_dtensor(tensor) else tensor
    return local.untyped_storage()._cdata


def address(local: Any) -> tuple[int, int]:
    """Address and length in bytes of what `contiguous_cpu` gave."""
    if dtypes.is_array(local):
        return dtypes.array_bytes(local)
    return dtypes.tensor_bytes(local)
