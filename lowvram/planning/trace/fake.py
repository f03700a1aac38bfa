"""Runs code on tensors without memory (fake tensors), as if they were on the device that a plan is for."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lowvram.compat.torch_compiler import activation_budget_restored
from lowvram.compat.torch_distributed import forget_meshes, pretend_ranks, shape_propagation_inside
from lowvram.compat.torch_fake import FakeTensor, FakeTensorMode, without_fake_mode
from lowvram.compat.torch_modes import FastDispatchMode, without_dispatch_modes
from lowvram.compat.torch_ops import CopyOps, NormOps, schema_of
from lowvram.compat.torch_trees import tree_leaves
from lowvram.compat.transformers import known_values_readable
from lowvram.config.errors import BadInput, Incompatible
from lowvram.config.texts import message
from lowvram.core.device import Card
from lowvram.core.fake_cache import FakeCache, Recipes
from lowvram.core.rig import Part
from lowvram.data.spec import MASK, POSITIONS, DataSpec
from lowvram.knobs.precision.fp32 import tf32_restored
from lowvram.planning.target import Target
from lowvram.planning.trace.cuda import acts_as_card
from lowvram.planning.trace.known_values import KnownValues, UnknownValue
from lowvram.planning.trace.streams import Streams

ROOT = Path(__file__).parents[2]
# Packages whose code runs a model; `reason` names the last line that is neither theirs nor torch's.
OWN = ("compat", "core", "planning", "loops", "compress/distillation", "worker")
MACHINERY = (str(Path(torch.__file__).parent), *(str(ROOT / name) for name in OWN))

ATEN = torch.ops.aten
DEVICE_OF, PROMOTED = torch.ops.prim.device.default, ATEN.promote_types.default
NUMBER_OF, CONSTANT = CopyOps.NUMBER.default, ATEN.lift_fresh.default
# Operators whose kernels make these many of their first arguments contiguous, so that results are; fake ones don't.
MADE_CONTIGUOUS = {
    **dict.fromkeys((ATEN.native_layer_norm.default, NormOps.RMS.default), 1),
    **dict.fromkeys((ATEN.native_layer_norm_backward.default, NormOps.RMS_BACKWARD.default), 2),
}
WEIGHT_OF = {ATEN.native_layer_norm.default: 2, ATEN.native_group_norm.default: 1}  # its place among the arguments
PROFILER = "profiler"  # the namespace of operators that mark spans of time, and have no tensors: FSDP calls many
FILLS = {ATEN.normal_.default, ATEN.uniform_.default, ATEN.zero_.default, ATEN.fill_.Scalar}


OnOperator = Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any], None]


class CantPlan(Exception):
    """A model can't be traced, because it depends on the values of tensors or fails. The message says where."""


@contextmanager
def fake_tensors(
    target: Target | None = None, on_operator: OnOperator | None = None, streams: Streams | None = None
) -> Iterator[KnownValues]:
    """Inside it CPU tensors have no memory, and torch treats them as tensors on `target`; None: as tensors on this CPU,
    with the ranks that there are. Yields the values that are known nevertheless.

    Args:
        on_operator: called after each operator, with its positional and named arguments and its result.
        streams: of the card, if `target` is one.

    Raises:
        CantPlan: the code inside depends on the value of a tensor, or fails on fake tensors.
    """
    with ExitStack() as undo:
        undo.enter_context(settings_restored())
        if target is not None:
            undo.enter_context(ranks_of(target.num_ranks, target.rank))
        if target is not None and target.card is not None:
            undo.enter_context(acts_as_card(target.card, streams))
        mode = undo.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        fake_cache = FakeCache(mode, recipes_for(target and target.card, 1 if target is None else target.num_ranks))
        planning_mode = undo.enter_context(PlanningMode(fake_cache, on_operator))
        undo.enter_context(known_values_readable(planning_mode.known.has))
        # To find shapes DTensor runs operators on whole tensors, which a real step never allocates.
        undo.enter_context(shape_propagation_inside(Unrecorded(planning_mode)))
        try:
            yield planning_mode.known
        except (BadInput, Incompatible, KeyboardInterrupt):
            raise
        except Exception as error:
            raise CantPlan(f"can't plan this model: {reason(error)}") from error


@lru_cache(4)
def recipes_for(card: Card | None, num_ranks: int) -> Recipes:
    """What operators make on a card (None: on a CPU), as far as traces in this process have met them: a third of a
    trace's time goes into operators that it meets first."""
    del card, num_ranks
    return {}


def reason(error: Exception) -> str:
    """Where in the model's code the error arose, and why, in one sentence."""
    frames = traceback.extract_tb(error.__traceback__)
    last = ([frame for frame in frames if not frame.filename.startswith(MACHINERY)] or frames)[-1]
    place = f'{"/".join(Path(last.filename).parts[-3:])}:{last.lineno}: "{last.line}"'
    first_line = (message(error).strip().splitlines() or [""])[0]
    names = [kind.__name__ for kind in type(error).__mro__]
    if "DataDependentOutputException" in names or "DynamicOutputShapeException" in names:
        return f"{place} depends on the values of a tensor, and a plan has none ({first_line})"
    return f"{place} raised {type(error).__name__}: {first_line}"


class PlanningMode(FastDispatchMode):
    """Runs operators on fake tensors.

    An optimizer that reads a value from a tensor, as Adafactor does, gets 1 (a floating-point one 1/2, so that NAdam
    doesn't divide by 1 - 1), since sizes don't depend on it. Other code gets the value if it is known; else that is an
    error. For speed, frequent queries of devices and number formats are answered here, and operators that only write
    values are skipped.
    """

    def __init__(self, fake_cache: FakeCache, on_operator: OnOperator | None) -> None:
        super().__init__()
        self.fake_cache, self.on_operator = fake_cache, on_operator
        self.known = KnownValues()
        self.num_updates = 0  # calls of an optimizer's `step` that are running
        self.promoted: dict[Any, torch.dtype] = {}  # results of promote_types, by its arguments

    def __enter__(self) -> PlanningMode:
        self.hooks = [register_optimizer_step_pre_hook(self.begin), register_optimizer_step_post_hook(self.end)]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self.hooks:
            hook.remove()

    def begin(self, *_: Any) -> None:
        self.num_updates += 1

    def end(self, *_: Any) -> None:
        self.num_updates -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if func is PROMOTED and args in self.promoted:
            return self.promoted[args]
        is_plain = all(kind is FakeTensor for kind in types)
        if not is_plain and any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # torch then calls this again for the rank's local tensors
        if func.namespace == PROFILER:
            with without_fake_mode():
                return func(*args, **(kwargs or {}))
        if func in FILLS and isinstance(args[0], FakeTensor):  # there is no memory to fill
            self.known.note(func, args, kwargs or {}, args[0])
            return args[0]
        if func is NUMBER_OF and isinstance(args[0], FakeTensor):
            if self.num_updates:
                return 0.5 if args[0].is_floating_point() else 1
            with suppress(UnknownValue):
                return self.known.number(args[0])
        if func in WEIGHT_OF:
            check_formats(args[0], args[WEIGHT_OF[func]])
        number = MADE_CONTIGUOUS.get(func, 0)
        given = (*(tensor.contiguous() for tensor in args[:number]), *args[number:]) if number else args
        out: Any = None if is_plain and only_writes(func) else self.fake_cache.run(func, given, kwargs or {})
        self.known.note(func, args, kwargs or {}, out)
        if func is PROMOTED:
            self.promoted[args] = out
        elif self.on_operator is not None and (func is CONSTANT or not func.is_view):  # a view has no own memory
            self.on_operator(func, args, kwargs or {}, out)
        return out


def check_formats(input: Tensor, weight: Tensor | None) -> None:
    """Raise what torch raises on real tensors: a norm's weight in fewer bits than its input can't be used."""
    if weight is not None and weight.dtype is not input.dtype and weight.dtype is not torch.float32:
        with without_dispatch_modes():
            F.layer_norm(torch.zeros(1, dtype=input.dtype), (1,), torch.zeros(1, dtype=weight.dtype))


@cache
def only_writes(operator: Any) -> bool:
    """Whether an operator only writes values into lists of tensors, as an optimizer's do: without values it can be
    skipped."""
    return operator.name().startswith(("aten::_foreach_", "aten::_fused_")) and not schema_of(operator).returns


class Unrecorded:
    """Inside it `on_operator` isn't called. Can be entered more than once."""

    def __init__(self, mode: PlanningMode) -> None:
        self.mode, self.on_operator = mode, mode.on_operator

    def __enter__(self) -> None:
        self.mode.on_operator = None

    def __exit__(self, *_: object) -> None:
        self.mode.on_operator = self.on_operator


@contextmanager
def settings_restored() -> Iterator[None]:
    """Restores settings of the process that knobs change."""
    with tf32_restored(), activation_budget_restored():
        yield


@contextmanager
def ranks_of(num_ranks: int, rank: int) -> Iterator[None]:
    """Inside it this process is one of `num_ranks`, whose collectives return at once.

    Raises:
        RuntimeError: the process is one of several real ranks, and `num_ranks` is more than 1.
    """
    was_there = dist.is_initialized()
    if num_ranks > 1:
        if was_there:
            raise RuntimeError("a process that is one of several ranks can't plan for others")
        pretend_ranks(num_ranks, rank)
    if rank:
        forget_meshes()
    try:
        yield
    finally:
        if rank:
            forget_meshes()
        if dist.is_initialized() and not was_there:
            dist.destroy_process_group()


def example(spec: DataSpec, num_samples: int, known: KnownValues) -> Part:
    """A batch of this many samples with the shapes of `spec`. Only the values of masks and positions stay known, which
    say where rows and sequences end."""
    part = Part(*spec.example(num_samples))
    inputs = part.inputs if isinstance(part.inputs, Mapping) else {"": part.inputs}
    given = (tensor for name, tensor in inputs.items() if name not in (MASK, POSITIONS))
    known.forget([*given, *tree_leaves(part.targets)])
    return part
