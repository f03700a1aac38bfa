"""Tensors without memory (fake tensors), treated as those of the device that a plan is for."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lowvram.compat.torch_compiler import activation_budget_restored
from lowvram.compat.torch_distributed import pretend_ranks, shapes_found_inside
from lowvram.compat.torch_fake import FakeTensor, FakeTensorMode
from lowvram.compat.torch_modes import FastDispatchMode
from lowvram.compat.torch_ops import CopyOps, schema_of
from lowvram.config.errors import BadInput, Incompatible
from lowvram.config.texts import message
from lowvram.core.rig import Part
from lowvram.data.spec import DataSpec
from lowvram.planning.target import Target
from lowvram.planning.trace.cuda import played
from lowvram.planning.trace.fake_cache import FakeCache

ROOT = Path(__file__).parents[2]
# What runs a model, in whose lines no reason lies.
MACHINERY = (str(Path(torch.__file__).parent), *(str(ROOT / name) for name in ("core", "planning", "loops", "worker")))

ATEN = torch.ops.aten
DEVICE_OF, PROMOTED = torch.ops.prim.device.default, ATEN.promote_types.default
NUMBER_OF, CONSTANT = CopyOps.NUMBER.default, ATEN.lift_fresh.default
FILLS = {ATEN.normal_.default, ATEN.uniform_.default, ATEN.zero_.default, ATEN.fill_.Scalar}


See = Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any], None]


class CantPlan(Exception):
    """A model does what can't be known without its numbers. The message says where."""


@contextmanager
def fake_tensors(target: Target | None = None, see: See | None = None) -> Iterator[None]:
    """Tensors that are made inside, on the CPU, have no memory. They are treated as those of `target`; None: as those
    of this CPU and its ranks.

    Args:
        see: is told of every operator that runs inside, its arguments by place and by name, and what it made.

    Raises:
        CantPlan: what is run inside asks for a number that isn't there, or can't be run in this way.
    """
    with ExitStack() as undo:
        undo.enter_context(settings_restored())
        if target is not None:
            undo.enter_context(ranks_of(target.num_ranks))
        if target is not None and target.card is not None:
            undo.enter_context(played(target.card))
        mode = undo.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        answers = undo.enter_context(PlanningMode(FakeCache(mode), see))
        # DTensor finds out shapes with whole tensors that have no memory on any device either.
        undo.enter_context(shapes_found_inside(Unrecorded(answers)))
        try:
            yield
        except (BadInput, Incompatible, KeyboardInterrupt):
            raise
        except Exception as error:
            raise CantPlan(f"can't plan this model: {reason(error)}") from error


def reason(error: Exception) -> str:
    """Where and why, in one sentence."""
    frames = traceback.extract_tb(error.__traceback__)
    told = [frame for frame in frames if not frame.filename.startswith(MACHINERY)] or frames
    place = f'{"/".join(Path(told[-1].filename).parts[-3:])}:{told[-1].lineno}: "{told[-1].line}"'
    first_line = (message(error).strip().splitlines() or [""])[0]
    names = [kind.__name__ for kind in type(error).__mro__]
    if "DataDependentOutputException" in names or "DynamicOutputShapeException" in names:
        return f"{place} depends on the values of a tensor, and a plan has none ({first_line})"
    return f"{place} raised {type(error).__name__}: {first_line}"


class PlanningMode(FastDispatchMode):
    """An optimizer that asks for the value of a number, as Adafactor does, is told 1: sizes don't depend on it. Whoever
    else asks gets no answer. Devices and number formats, for which torch asks often, are answered here, and nothing is
    filled with values."""

    def __init__(self, fake_cache: FakeCache, see: See | None) -> None:
        super().__init__()
        self.fake_cache, self.see = fake_cache, see
        self.num_updates = 0  # that are under way
        self.promoted: dict[Any, torch.dtype] = {}  # number formats, by the two that meet

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
            return NotImplemented  # then it comes again, for the tensors that this rank holds
        if func in FILLS and isinstance(args[0], FakeTensor):
            return args[0]  # there is nothing to fill
        if func is NUMBER_OF and self.num_updates and isinstance(args[0], FakeTensor):
            return 1.0 if args[0].is_floating_point() else 1
        out: Any = None if is_plain and only_writes(func) else self.fake_cache.run(func, args, kwargs or {})
        if func is PROMOTED:
            self.promoted[args] = out
        elif self.see is not None and (func is CONSTANT or not func.is_view):  # a view has no memory of its own
            self.see(func, args, kwargs or {}, out)
        return out


@cache
def only_writes(operator: Any) -> bool:
    """Whether it writes values into many tensors, as an optimizer's does, and makes none: there are no values."""
    return operator.name().startswith(("aten::_foreach_", "aten::_fused_")) and not schema_of(operator).returns


class Unrecorded:
    """Inside it nobody is told what is made. May be entered again and again."""

    def __init__(self, answers: PlanningMode) -> None:
        self.answers, self.see = answers, answers.see

    def __enter__(self) -> None:
        self.answers.see = None

    def __exit__(self, *_: object) -> None:
        self.answers.see = self.see


@contextmanager
def settings_restored() -> Iterator[None]:
    """Knobs that set the process itself leave no mark on it."""
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # pyright: ignore[reportAttributeAccessIssue]
    before = matmul.fp32_precision, conv.fp32_precision
    try:
        with activation_budget_restored():
            yield
    finally:
        matmul.fp32_precision, conv.fp32_precision = before


@contextmanager
def ranks_of(num_ranks: int) -> Iterator[None]:
    """This process is the first of so many, who answer at once and say nothing. Where it has real partners already, it
    can only play alone."""
    was_there = dist.is_initialized()
    if num_ranks > 1:
        if was_there:
            raise RuntimeError("a process that is one of several ranks can't plan for others")
        pretend_ranks(num_ranks)
    try:
        yield
    finally:
        if dist.is_initialized() and not was_there:
            dist.destroy_process_group()


def example(spec: DataSpec, num_samples: int) -> Part:
    """A part of the right shape."""
    return Part(*spec.example(num_samples))
