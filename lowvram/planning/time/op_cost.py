"""Counts the FLOPs and bytes of each operator of a step while it is traced: one line of integers per operator.

FLOPs of matrix products and convolutions follow torch's formulas (torch.utils.flop_counter), those of fused attention
Dao et al., "FlashAttention" (2022), appendix B. All other operators are bound by memory: only bytes are counted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import cache, partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lowvram.compat.torch_distributed import group_named
from lowvram.compat.torch_modes import is_traceable_wrapper_subclass
from lowvram.compat.torch_ops import CopyOps, schema_of
from lowvram.compat.torch_trees import tree_leaves
from lowvram.core import host
from lowvram.core.fused import LAUNCHED, LIBRARY
from lowvram.core.ledger import ENGINE
from lowvram.core.mesh import dimension_of
from lowvram.core.row_shape import CONTEXT, DATA, PIPELINE, TENSOR
from lowvram.knobs.precision.fp32 import uses_tf32
from lowvram.models.attention import Reach
from lowvram.models.flex_attention import NEAR_ATTENTION, NEAR_ATTENTION_BACKWARD, num_pairs
from lowvram.planning.time.op_class import ATTENTIONS, CONVOLUTIONS, FAMILIES, FLOP_FAMILIES, Family, family_of
from lowvram.planning.trace.events import PHASES, Phase

ATEN = torch.ops.aten


class Column(IntEnum):
    """The columns of `Trace.work`. The last three are affine in the samples of a part; the others don't depend on
    them."""

    PART = 0  # the part of the logical batch, counted from 1; 0 before the first
    PHASE = 1  # index into `PHASES`
    STREAM = 2  # index into `STREAMS`
    FAMILY = 3  # index into `FAMILIES`
    FORMAT = 4  # the narrowest floating-point format among the arguments; index into `FORMATS`
    TIMES = 5  # how often the operator runs
    MODULE = 6  # index into `Trace.modules` of the innermost one in its forward pass; -1: none
    CALLS = 7  # how many operators the host could call in the time that this one takes it
    FLOPS = 8  # 0 for operators that are bound by memory
    BYTES = 9  # read and written; for a copy between host and device, those copied
    NEW = 10  # bytes of the tensors that it makes


class Stream(Enum):
    """What runs an operator. Streams run in parallel. Messages to other ranks are apart by the dimension of the mesh
    along which they go; their bytes are those that this rank sends."""

    DEVICE = "device"
    HOST = "host"  # its processor
    TO_HOST = "to host"
    TO_DEVICE = "to device"
    BY_DATA = "data"
    BY_PIPELINE = "pipeline"
    BY_CONTEXT = "context"
    BY_TENSOR = "tensor"


STREAMS = list(Stream)
BY_DIMENSION = {
    DATA: Stream.BY_DATA,
    PIPELINE: Stream.BY_PIPELINE,
    CONTEXT: Stream.BY_CONTEXT,
    TENSOR: Stream.BY_TENSOR,
}
BETWEEN_RANKS = list(BY_DIMENSION.values())
NO_PRODUCT, UNKNOWN = "none", "other"
NO_MODULE = -1
FORMATS = [NO_PRODUCT, "fp32", "tf32", "bf16", "fp16", "fp8", UNKNOWN]
FORMAT_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
FP8_BYTES = 1

# Operators that run no kernel.
FREE = {
    CopyOps.VIEW,
    ATEN.empty,
    ATEN.empty_like,
    ATEN.empty_strided,
    ATEN.new_empty,
    ATEN.new_empty_strided,
    ATEN.lift_fresh,
    ATEN.resize_,
    ATEN.set_,
}
COLLECTIVES = ("c10d", "_c10d_functional")  # the namespaces of torch.distributed's operators
# Of those the argument that is the whole tensor, or one rank's part of it, and how often a ring sends the whole.
RINGS = {
    "allreduce_": (0, 2),
    "_allgather_base_": (0, 1),
    "_reduce_scatter_base_": (1, 1),
    "alltoall_base_": (1, 1),
    "broadcast_": (0, 1),
    "all_reduce": (0, 2),
    "all_gather_into_tensor": (0, 1),
    "reduce_scatter_tensor": (0, 1),
    "recv_": (0, 0),
    "wait_tensor": (0, 0),
    "_wrap_tensor_autograd": (0, 0),
}
OF_PARTS = {"all_gather_into_tensor"}  # given one rank's part
MESSAGE = "send"  # to one rank
# Operators that read or write only those elements of their first tensor that the other arguments select.
PICKING = {
    ATEN.embedding,
    ATEN.gather,
    ATEN.index,
    ATEN.index_select,
    ATEN.nll_loss_forward,
    ATEN.index_add_,
    ATEN.index_put_,
    ATEN.scatter_,
    ATEN.scatter_add_,
}
# Operators that don't read the tensors that they write to.
OVERWRITING = {ATEN.copy_, CopyOps.COPY_MANY, ATEN.fill_, ATEN.zero_, CopyOps.ZERO_MANY}
UNREAD = {ATEN.nll_loss_backward: "self"}  # arguments of which only the shape is used
SCALED = "grads"  # fused optimizers write into this argument only if they get a loss scale, which lowvram never passes
COPIES = {ATEN.copy_, CopyOps.COPY_MANY}
# By which autograd sums gradients: in C++ one took the host 2.5 µs, while a step's other operators took some 50.
ADDITIONS = {ATEN.add.Tensor, ATEN.add_.Tensor}
FUSED_CALLS = 10  # of a compiled kernel of few operators: a call took the host of an H200 some 300 µs
# How many times as long FlexAttention takes for a pair of tokens as full attention. On an H200 it was 3.4 to 5.7 in
# bf16, 5.6 to 7.8 in fp32 (docs/results/h200/local_attention.jsonl).
FLEX_IN_16_BITS, FLEX_IN_32_BITS = 4, 7


@final
@dataclass(frozen=True)
class Recipe:
    """How to compute an operator's work from its arguments."""

    reads: list[tuple[int, str, int]]  # tensor arguments: position, name, how often each byte is read or written
    written: int | None  # position of the first argument that it writes into
    makes: bool  # whether it makes tensors
    new: int  # how often each byte of the tensors that it makes is read or written
    count_flops: Callable[..., int] | None  # None: bound by memory
    is_copy: bool
    family: Family
    calls: int  # of `Column.CALLS`


@cache
def recipe_of(operator: Any) -> Recipe | None:
    """The recipe of an operator; None if it takes no time."""
    packet, schema = operator.overloadpacket, schema_of(operator)
    writes = any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments)
    makes = any("Tensor" in str(result.type) and result.alias_info is None for result in schema.returns)
    if packet in FREE or not (writes or makes):
        return None
    reads: list[tuple[int, str, int]] = []
    written: int | None = None
    for place, argument in enumerate(schema.arguments):
        if "Tensor" in str(argument.type):
            may_write = argument.alias_info is not None and argument.alias_info.is_write
            is_written = may_write and argument.name != SCALED
            written = place if is_written and written is None else written
            is_read = not (argument.is_out or (is_written and packet in OVERWRITING))
            if argument.name != UNREAD.get(packet):
                reads.append((place, argument.name, is_written + is_read))
    if packet in PICKING:
        reads = [(place, name, 2 * times * (place > 0)) for place, name, times in reads]
    new = int(makes) * (2 if packet in PICKING else 1)
    count_flops = flops_formula(packet)
    family = family_of(packet, count_flops is not None)
    is_compiled = operator.namespace == LIBRARY.ns and operator not in LAUNCHED
    calls = FUSED_CALLS if is_compiled else 1
    return Recipe(reads, written, makes, new, count_flops, packet in COPIES, family, calls)


def flops_formula(packet: Any) -> Callable[..., int] | None:
    """A function that counts an operator's FLOPs from its arguments and its result `out_val`; None if unknown."""
    family = family_of(packet, is_product=True)
    is_backward = family is Family.ATTENTION_BACKWARD
    if packet in (NEAR_ATTENTION, NEAR_ATTENTION_BACKWARD):
        return partial(flex_flops, is_backward)
    if family in ATTENTIONS:
        names = [argument.name for argument in schema_of(packet.default).arguments]
        causal = names.index("is_causal")

        def count(*args: Any, out_val: Any, **named: Any) -> int:
            is_causal = named.get("is_causal", args[causal] if len(args) > causal else False)
            query, key, value = args[is_backward : is_backward + 3]
            return attention_flops(query, key, value, is_backward, is_causal)

        return count
    return flop_registry.get(packet)


def attention_flops(query: Tensor, key: Tensor, value: Tensor, is_backward: bool, is_causal: bool) -> int:
    """FLOPs of a fused attention kernel on tensors (samples, heads, length, width): two products over all pairs of
    tokens, and five in the backward pass, one of which is recomputed. A causal mask skips half of the pairs among the
    tokens that have queries, which are the last ones.
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    num_skipped = num_queries**2 // 2 if is_causal else 0
    num_pairs = query.shape[0] * query.shape[1] * (num_queries * num_keys - num_skipped)
    widths = (3, 2) if is_backward else (1, 1)
    return 2 * num_pairs * (widths[0] * query.shape[-1] + widths[1] * value.shape[-1])


def flex_flops(is_backward: bool, *args: Any, out_val: Any) -> int:
    """The FLOPs that full attention would do in the time of FlexAttention, which has a lower rate."""
    query, key, value = args[is_backward : is_backward + 3]
    length, reach = query.shape[2], Reach(*args[-2:])
    times = FLEX_IN_16_BITS if query.itemsize == 2 else FLEX_IN_32_BITS
    return times * attention_flops(query, key, value, is_backward, False) * num_pairs(reach, length) // length**2


@final
class OpCounter:
    """Records the work of a step, line by line."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, ...]] = []  # by `Column`
        self.part_and_phase = (0, PHASES.index(Phase.BETWEEN))
        self.module = NO_MODULE  # whose forward pass runs
        self.times = 1  # how often what is recorded is done
        self.num_before_update = 0  # lines before the optimizer's update
        self.traffic = (0, 0)  # bytes copied between host and device that are recorded already

    def begin(self) -> None:
        """Start counting."""
        self.traffic = traffic_so_far()

    def mark(self, phase: Phase) -> None:
        """Begin a phase; each forward pass begins another part of the batch."""
        self.note_traffic()
        self.part_and_phase = (self.part_and_phase[0] + (phase is Phase.FORWARD), PHASES.index(phase))

    @contextmanager
    def stands_for(self, times: int) -> Iterator[None]:
        """Inside it, what is recorded is done so many times as often."""
        outer, self.times = self.times, self.times * times
        try:
            yield
        finally:
            self.times = outer

    def note(self, operator: Any, args: tuple[Any, ...], named: Mapping[str, Any], out: Any) -> None:
        if operator.namespace in COLLECTIVES:
            if sent := sent_bytes(operator, args):
                group = group_of(args)
                stream = Stream.BY_DATA if group is None else BY_DIMENSION[dimension_of(group)]
                self.line(stream, NO_PRODUCT, 0, sent)
            return
        recipe = recipe_of(operator)
        if recipe is None:
            return
        stream = stream_of(recipe, args) if host.is_anything_marked() else Stream.DEVICE
        if stream is None:
            return
        num_positional = len(args)
        new_bytes = size(out) if recipe.makes else 0
        num_bytes = recipe.new * new_bytes
        for place, name, times in recipe.reads:
            if times and (place < num_positional or name in named):
                num_bytes += times * size(args[place] if place < num_positional else named[name])
        flops = recipe.count_flops(*args, **named, out_val=out) if recipe.count_flops else 0
        number_format = format_of([*args, *named.values()], recipe.family)
        calls = 0 if operator in ADDITIONS and is_called_by_autograd() else recipe.calls
        self.line(stream, number_format, flops, num_bytes, recipe.family, new_bytes, calls)

    def note_traffic(self) -> None:
        """Record the copies between host and device in the phase that ends."""
        now = traffic_so_far()
        for stream, before, after in zip((Stream.TO_HOST, Stream.TO_DEVICE), self.traffic, now, strict=True):
            if after > before:
                self.line(stream, NO_PRODUCT, 0, after - before)
        self.traffic = now

    def line(
        self,
        stream: Stream,
        number_format: str,
        flops: int,
        num_bytes: int,
        family: Family = Family.MOVING,
        new_bytes: int = 0,
        calls: int = 1,
    ) -> None:
        codes = (STREAMS.index(stream), FAMILIES.index(family), FORMATS.index(number_format))
        self.lines.append((*self.part_and_phase, *codes, self.times, self.module, calls, flops, num_bytes, new_bytes))

    def begin_update(self, *_: Any) -> None:
        self.num_before_update = len(self.lines)

    def end_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Record an update whose operators weren't seen, as those of torchao's compiled kernels, one for each weight:
        it reads the gradients, and reads and writes weights and state, once."""
        if len(self.lines) > self.num_before_update:
            return
        weights = [weight for group in optimizer.param_groups for weight in group["params"] if weight.grad is not None]
        state = [leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, Tensor)]
        gradients = [weight.grad for weight in weights]
        if weights:
            stream = Stream.HOST if host.is_computing() else Stream.DEVICE
            num_bytes = size(gradients) + 2 * size(weights) + 2 * inner_size(state)
            self.line(stream, NO_PRODUCT, 0, num_bytes, calls=FUSED_CALLS * len(weights))

    def work(self) -> Tensor:
        """(operators, columns) int64."""
        self.note_traffic()
        return torch.tensor(self.lines, dtype=torch.int64).view(-1, len(Column))


def sent_bytes(operator: Any, args: tuple[Any, ...]) -> int:
    """The bytes that each rank of a ring sends for a collective: all but its own share of a whole tensor, and for a
    sum that all ranks get twice as many; and the bytes of a message."""
    name = operator.overloadpacket.__name__
    if name == MESSAGE:
        return size(args[0])
    place, times = RINGS.get(name, (0, 1))
    group = group_of(args) if times else None
    num_ranks = 1 if group is None else group.size()
    whole_bytes = size(args[place]) * (num_ranks if name in OF_PARTS else 1)
    return times * whole_bytes * (num_ranks - 1) // num_ranks


def group_of(args: tuple[Any, ...]) -> dist.ProcessGroup | None:
    """The ranks that take part in a collective, whose operator is given their group, or the group's name last."""
    group = next((each for each in args if isinstance(each, torch.ScriptObject)), None)
    if group is not None:
        return dist.ProcessGroup.unbox(group)
    return group_named(args[-1]) if isinstance(args[-1], str) else None


def is_called_by_autograd() -> bool:
    """Whether the operator that a dispatch mode sees was called by the backward pass itself, by no code in Python."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != "__torch_dispatch__":
        frame = frame.f_back
    return frame is not None and frame.f_back is not None and frame.f_back.f_code.co_filename == ENGINE


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in an argument that is a tensor or a list."""
    if isinstance(value, Tensor):
        return [value]
    return [item for item in value if isinstance(item, Tensor)] if isinstance(value, list | tuple) else []


def size(value: Any) -> int:
    """The bytes of a tensor or a list of tensors; 0 for anything else."""
    return sum(tensor.nbytes for tensor in tensors_of(value))


def inner_size(tensors: list[Tensor]) -> int:
    """The bytes of tensors; for wrapper subclasses, those of the tensors inside."""
    return sum(storage.nbytes() for tensor in tensors for storage in host.storages(tensor))


def format_of(arguments: list[Any], family: Family) -> str:
    """The narrowest floating-point format among an operator's arguments; for fp32 products, whether TF32 is on."""
    parts = [part for value in arguments for tensor in tensors_of(value) for part in parts_of(tensor)]
    dtypes = {part.dtype for part in parts if part.is_floating_point()}
    if not dtypes:
        return UNKNOWN
    narrowest = min(dtypes, key=lambda dtype: dtype.itemsize)
    if narrowest.itemsize == FP8_BYTES:
        return "fp8"
    if narrowest is torch.float32:
        return "tf32" if family in FLOP_FAMILIES and uses_tf32(family in CONVOLUTIONS) else "fp32"
    return FORMAT_NAMES.get(narrowest, UNKNOWN)


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The tensors inside a wrapper subclass; for any other tensor, itself."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    inner_tensors = [inner for name in names if isinstance(inner := getattr(tensor, name), Tensor)]
    return [part for inner in inner_tensors for part in parts_of(inner)]


def traffic_so_far() -> tuple[int, int]:
    """Bytes copied to the host and to the device so far."""
    return host.traffic.to_host_bytes, host.traffic.to_device_bytes


def stream_of(recipe: Recipe, args: tuple[Any, ...]) -> Stream | None:
    """The stream that runs an operator: that of the host inside `host.computing`, and for operators that write into
    host memory. None for a copy between host and device, as `host.traffic` counts those."""
    if host.is_computing():
        return Stream.HOST
    if recipe.written is None or recipe.written >= len(args):
        return Stream.DEVICE
    is_host = is_on_host(args[recipe.written])
    if recipe.is_copy and is_host != is_on_host(args[1]):
        return None
    return Stream.HOST if is_host else Stream.DEVICE


def is_on_host(value: Any) -> bool:
    """Whether a tensor, or the first of a list, is in host memory."""
    first = value[0] if isinstance(value, list | tuple) and value else value
    return isinstance(first, Tensor) and host.holds(first)
