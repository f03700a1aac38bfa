"""Functions for tensors that may be sharded over ranks (DTensor) or not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor

from lowvram.compat.torch_distributed import all_gather
from lowvram.compat.torch_modes import is_traceable_wrapper_subclass
from lowvram.compat.torch_ops import norms
from lowvram.core.mesh import layout, ranks_along
from lowvram.core.row_shape import PIPELINE

T = TypeVar("T")
AnyTensor = TypeVar("AnyTensor", bound=Tensor)
Groups = tuple[dist.ProcessGroup, ...]


ROW_ORDER = "lowvram_row_order"  # an attribute of sharded tensors


def set_row_order(tensor: Tensor, order: Tensor | None) -> None:
    """Note in which order a sharded tensor has the rows of the whole one, so that each rank has the rows that it needs.
    None: in their own order.

    Args:
        order: indices of the whole's rows (or, of a tensor that is split in its second dimension, columns).
    """
    if order is not None:
        setattr(tensor, ROW_ORDER, order)


def row_order(tensor: Tensor) -> Tensor | None:
    """See `set_row_order`."""
    return getattr(tensor, ROW_ORDER, None)


PLACE = "lowvram_place"  # an attribute of parameters


def set_place(parameter: Tensor, place: int | None) -> None:
    """Note which of all parameters of the model one is, where ranks have different ones."""
    if place is not None:
        setattr(parameter, PLACE, place)


def place_of(parameter: Tensor) -> int | None:
    """See `set_place`; None where all ranks have the same parameters."""
    return getattr(parameter, PLACE, None)


ELSEWHERE = "lowvram_counted_elsewhere"  # an attribute of gradients


def count_elsewhere(gradient: Tensor) -> None:
    """Mark a gradient that another rank has, too, which counts it in sums over ranks."""
    setattr(gradient, ELSEWHERE, True)


def with_notes(tensor: AnyTensor, of: Tensor) -> AnyTensor:
    """A tensor, with what is noted at the one that it replaces."""
    set_row_order(tensor, row_order(of))
    set_place(tensor, place_of(of))
    return tensor


def reordered(whole: Tensor, order: Tensor | None, like: DTensor) -> Tensor:
    """A whole tensor whose rows stand in this order, in the dimension in which the last dimension of its mesh splits
    `like`, if it does."""
    place = like.placements[-1]
    return whole if order is None or not splits(place) else whole.index_select(dim_of(place), order.to(whole.device))


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor, sharing its memory; a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """The whole tensor, detached. For a sharded one this is a collective: all ranks must call it.

    Args:
        like: of a gradient, its parameter, in whose order its rows are; None: this is noted at the tensor itself.
    """
    order, tensor = row_order(tensor if like is None else like), on_mesh(tensor.detach())
    if not isinstance(tensor, DTensor):
        return tensor
    return in_own_order(tensor.full_tensor(), tensor, order)


def in_own_order(whole: Tensor, like: DTensor, order: Tensor | None = None) -> Tensor:
    """A tensor that was joined from the shards of `like`, with its rows in the order of the whole one.

    Args:
        order: of its rows now; None: that of `like`.
    """
    order = row_order(like) if order is None else order
    return whole if order is None else reordered(whole, order.argsort(), like)


def on_mesh(tensor: Tensor) -> Tensor:
    """A sharded tensor, moved to the device of its mesh, over which its ranks communicate; any other tensor itself."""
    return tensor.to(tensor.device_mesh.device_type) if is_off_mesh(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def is_off_mesh(tensor: Tensor) -> bool:
    """Whether a tensor's shards are on another device than that of its mesh, such as in host memory."""
    return isinstance(tensor, DTensor) and local(tensor).device.type != tensor.device_mesh.device_type


def placed(whole: Tensor, like: Tensor, device: torch.device | None = None) -> Tensor:
    """`whole` itself; if `like` is a DTensor, a new DTensor of the same layout with these values, in their dtype.
    Communicates nothing, so every rank must pass the same `whole`.

    Args:
        whole: of the shape of `like`, or of the length 1 in some dimensions; these aren't split. Or already a DTensor
            of this layout, whose shard may be on another device.
        device: of the shard; None: that of the shard of `like`.
    """
    if not isinstance(like, DTensor):
        return whole
    device, order = local(like).device if device is None else device, row_order(like)
    if whole.shape != like.shape:
        places = [place if is_split(whole, like, place) else Replicate() for place in like.placements]
        like = distribute_tensor(whole, like.device_mesh, places, src_data_rank=None)
    # Before the tensor is distributed, which holds more copies for a moment.
    value = torch.empty_like(like, dtype=whole.dtype, device=device)
    if not isinstance(whole, DTensor):
        whole = reordered(whole, order, like)
        whole = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    local(value).copy_(local(whole))
    return value


def splits(place: Placement) -> bool:
    """Whether a dimension of a mesh splits a tensor that has this placement there. FSDP2 has a class of its own for
    what is split twice in one dimension."""
    return not isinstance(place, Replicate)


def is_split(whole: Tensor, like: Tensor, place: Placement) -> bool:
    """Whether a whole tensor has the length of `like` in the dimension that this placement of `like` splits."""
    return splits(place) and whole.shape[dim_of(place)] == like.shape[dim_of(place)]


def dim_of(place: Any) -> int:
    """The dimension of a tensor that a placement splits."""
    return place.dim


def is_unevenly_split(tensor: Tensor) -> bool:
    """Whether some ranks have fewer rows of a tensor than others."""
    if not isinstance(tensor, DTensor):
        return False
    places = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return any(splits(place) and tensor.shape[dim_of(place)] % size for place, size in places)


def split_dimensions(tensor: DTensor) -> list[int]:
    """The dimensions of the mesh over which a tensor is split; the others hold copies."""
    return [number for number, place in enumerate(tensor.placements) if splits(place)]


def place_of_own(tensor: DTensor) -> tuple[int, int]:
    """Which of all shards of a tensor, in the order of `all_shards`, is this rank's; and how many there are."""
    mesh, place, number = tensor.device_mesh, 0, 1
    for dim in split_dimensions(tensor):
        place, number = place * mesh.size(dim) + mesh.get_local_rank(dim), number * mesh.size(dim)
    return place, number


def all_shards(tensor: DTensor) -> list[Tensor]:
    """The shards of all ranks, which may be tensors made of others, and of other kinds on other ranks. A collective:
    all ranks must call it. Each rank holds all of them for a moment."""
    mesh, shards = tensor.device_mesh, [local(tensor.detach())]
    for dim in split_dimensions(tensor):
        group, size = mesh.get_group(dim), mesh.size(dim)
        shards = [each for shard in shards for each in all_of(shard, group, size, mesh.device_type)]
    return shards


def all_of(own: Tensor, group: dist.ProcessGroup, size: int, device_type: str) -> list[Tensor]:
    """The tensors that the ranks of a group have, as for `all_shards`."""
    parts, how = taken_apart(own)
    data = torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts]).to(device_type)
    found: list[Any] = [None] * size
    dist.all_gather_object(found, (len(data), how), group)
    most = max(num_bytes for num_bytes, _ in found)
    together = data.new_empty(most * size)
    all_gather(together, torch.cat([data, data.new_zeros(most - len(data))]), group)
    pieces = zip(together.split(most) if most else [together] * size, found, strict=True)
    return [put_together(piece[:num_bytes].to(own.device), how) for piece, (num_bytes, how) in pieces]


def taken_apart(tensor: Tensor) -> tuple[list[Tensor], Any]:
    """The plain tensors of which a tensor is made, itself if it is one, and how to put them together."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor], (None, None, {"": (tensor.dtype, tensor.shape)})
    names, context = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names}
    return [*parts.values()], (type(tensor), context, {name: (each.dtype, each.shape) for name, each in parts.items()})


def put_together(data: Tensor, how: Any) -> Tensor:
    """The inverse of `taken_apart`, of the parts' bytes."""
    kind, context, forms = how
    sizes = [dtype.itemsize * shape.numel() for dtype, shape in forms.values()]
    pieces = zip(data.split(sizes), forms.items(), strict=True)
    parts = {name: piece.clone().view(dtype).view(shape) for piece, (name, (dtype, shape)) in pieces}
    return parts[""] if kind is None else kind.__tensor_unflatten__(parts, context, None, None)


def reshard(model: nn.Module) -> None:
    """Free what a model has gathered, as for a step that has failed, or for an evaluation: its parameters are sharded
    again. Communicates nothing."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def joined(shards: Sequence[Tensor], like: DTensor) -> Tensor:
    """The whole of a tensor that is laid out as `like` is, given the local shard of each rank."""

    def join(ranks: Tensor, places: Sequence[Placement]) -> Tensor:
        if not places:
            return shards[int(ranks)]
        *first, last = places  # the last dimension of a mesh splits a tensor first
        if not splits(last):
            return join(ranks.select(-1, 0), first)
        return torch.cat([join(each, first) for each in ranks.unbind(-1)], dim_of(last))

    return join(like.device_mesh.mesh, like.placements)


def distinct(shards: Sequence[T], like: DTensor) -> list[T]:
    """What the ranks have of a tensor that is laid out as `like` is, in order and without copies."""
    ranks = like.device_mesh.mesh
    for number, place in reversed(list(enumerate(like.placements))):
        if not splits(place):
            ranks = ranks.select(number, 0)
    return [shards[rank] for rank in ranks.flatten().tolist()]


def make_contiguous(model: nn.Module) -> None:
    """Make all parameters contiguous, as FSDP2 (torch 2.13) requires. Convolutions over channels_last images then
    reorder their weights in each use."""
    contiguous_of: dict[Tensor, nn.Parameter] = {}  # so that tied parameters stay tied
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.is_contiguous():
                contiguous = nn.Parameter(parameter.detach().contiguous(), parameter.requires_grad)
                with_notes(contiguous, parameter)
                module.register_parameter(name, contiguous_of.setdefault(parameter, contiguous))


def class_name(module: nn.Module) -> str:
    """The name of the module's class, without the subclass that FSDP2 makes of it."""
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule)).__name__


def spread_as(like: Tensor, shard: Tensor) -> Tensor:
    """This rank's `shard`, on any device, as part of a DTensor that is laid out over the ranks as `like` is."""
    if not isinstance(like, DTensor):
        return shard
    stride = torch.empty(like.shape, device="meta").stride()
    return DTensor.from_local(
        shard, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=stride
    )


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The Euclidean norm of all tensors as one vector (0-dim, at least fp32), over the shards of all ranks too.

    With shards it is a collective: all ranks must call it. Doesn't wait for a CUDA device.
    """
    return square_sum(tensors).sqrt()


def square_sum(tensors: Iterable[Tensor]) -> Tensor:
    """The sum of all squares (0-dim, at least fp32), over the shards of all ranks too."""
    squares, tensors = SquareSum(), list(tensors)
    for norm, tensor in zip(norms_of([local(tensor) for tensor in tensors]), tensors, strict=True):
        squares.add_norm(norm, tensor)
    return squares.total()


def norms_of(tensors: list[Tensor]) -> Sequence[Tensor]:
    """The Euclidean norm of each tensor (0-dim, at least fp32), in few CUDA kernels however many tensors there are."""
    tensors = [as_real(tensor) for tensor in tensors]
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
    return norms(tensors, dtype) if tensors else []


def as_real(tensor: Tensor) -> Tensor:
    """A complex tensor (...) as the real numbers that it consists of (..., 2); any other itself."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def whole_norms(norms: Sequence[Tensor], of: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm of each of some tensors (n,), given those of this rank's shards (0-dim, on one device).

    With shards it is a collective for each of their groups: all ranks must call it. Doesn't wait for a CUDA device.
    """
    places_of: dict[Groups, list[int]] = {}
    for place, tensor in enumerate(of):
        places_of.setdefault(groups_of(tensor), []).append(place)
    found = list(norms)
    for groups, places in in_order(places_of):
        if groups:
            squares = summed_over(groups, torch.stack([norms[place] for place in places]).square())
            for place, norm in zip(places, squares.sqrt().unbind(), strict=True):
                found[place] = norm
    return torch.stack(found)


def groups_of(tensor: Tensor) -> Groups:
    """The groups of ranks over which a tensor is sharded, one for each dimension of its mesh that splits it: a sum over
    all its elements is a sum over each of them. Empty if this rank holds it whole."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh, places = tensor.device_mesh, enumerate(tensor.placements)
    return tuple(mesh.get_group(dim) for dim, place in places if not isinstance(place, Replicate))


def is_sharded(tensor: Tensor) -> bool:
    """Whether this rank holds only a part of a tensor."""
    return bool(groups_of(tensor))


def is_sharded_alike(tensors: Sequence[Tensor]) -> bool:
    """Whether all tensors are sharded over the same ranks, in the same dimension."""
    layouts = {(each.device_mesh, each.placements) if isinstance(each, DTensor) else None for each in tensors}
    return len(layouts) == 1 and None not in layouts


def in_order(by_groups: dict[Groups, list[T]]) -> list[tuple[Groups, list[T]]]:
    """What is to be summed over groups of ranks, in an order that all ranks have in common."""
    return sorted(by_groups.items(), key=lambda item: [group.group_name for group in item[0]])


def summed_over(groups: Groups, tensor: Tensor) -> Tensor:
    """The sum over all ranks of some groups, in place. A collective."""
    for group in groups:
        dist.all_reduce(tensor, group=group)
    return tensor


@final
class SquareSum:
    """The sum of the squares of tensors that are added one after another, and may be freed in between."""

    def __init__(self) -> None:
        self._norms: dict[Groups, list[Tensor]] = {}  # of this rank's shards, by what the tensors are sharded over

    def add(self, values: Tensor, of: Tensor) -> None:
        """Add `values`: this rank's shard, on any device, of a tensor with the layout of `of`."""
        values = as_real(values)
        norm = torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, torch.float32))
        self.add_norm(norm.to(local(of).device), of)

    def add_norm(self, norm: Tensor, of: Tensor) -> None:
        """The same, given the Euclidean norm of the values."""
        if getattr(of, ELSEWHERE, False):
            return
        self._norms.setdefault(groups_of(of), []).append(norm)

    def total(self) -> Tensor:
        """0-dim, at least fp32. With shards it is a collective: all ranks must call it. Doesn't wait for a CUDA
        device."""
        sums = [summed_over(groups, torch.stack(norms).square().sum()) for groups, norms in in_order(self._norms)]
        stages, laid_out = ranks_along(PIPELINE), layout()
        if stages is None or laid_out is None:
            return reduce(torch.add, sums) if sums else torch.zeros(())
        own = reduce(torch.add, sums) if sums else torch.zeros((), device=laid_out.mesh.device_type)
        return stages.sum(own.double()).to(own.dtype)  # a stage without gradients doesn't know the others' format
