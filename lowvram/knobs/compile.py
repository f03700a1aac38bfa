"""compile: whether the model is compiled, and how much of it at a time.

Ansel et al., "PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and Graph Compilation"
(2024): torch.compile. DeVito, "TorchScript" (2018), which PyTorch retires.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, final
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lowvram.compat.torch_compiler import use_eager_random_numbers, use_numpys_generator
from lowvram.compat.torch_modes import TorchDispatchMode
from lowvram.compat.torch_modules import own_buffers
from lowvram.compat.torch_ops import CopyOps
from lowvram.compat.torch_trees import tree_leaves
from lowvram.config.errors import Incompatible, require
from lowvram.core.changes import Change, OfEntry
from lowvram.core.fact import Fact, ModelFact
from lowvram.core.fingerprints import fingerprint
from lowvram.core.generators import OfTorch, global_sources, restore
from lowvram.core.knob import Exactness, Knob, Neutral, Stage
from lowvram.core.probes.stated import HAS_FEW_SHAPES
from lowvram.core.probes.writes import STEADY_BLOCKS
from lowvram.core.repeat import First, Repeatable
from lowvram.core.rig import Rig
from lowvram.core.structure import BLOCKS, Blocks, Structure, unless

# Graphs of the same code: kinds of blocks x train and eval x shapes. torch's default of 8 is too low for a ResNet-50.
RECOMPILE_LIMIT = 64
# TorchScript records numbers and texts that a block holds: with others it is recorded anew.
RECORDED = (int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
MOST_RECORDINGS = 8
NUM_COMPARED = 2  # calls of each trace after the one that was recorded
# Errors by the values of a batch, which the block itself would raise, too. TorchScript's interpreter repeats them.
OF_VALUES = "index out of range|out of bounds|device-side assert"


@final
@dataclass(frozen=True)
class Eager(Neutral):
    """The model runs eagerly."""

    stage = Stage.COMPILE
    searched = False
    breaks_always = frozenset({Fact.COMPILED})


def has_plain_blocks(known: Structure) -> bool:
    found = known.get(Blocks())
    return found.has_plain_blocks or not found.blocks


PLAIN_BLOCKS = ModelFact(
    "blocks take only tensors, as positional arguments, and return one tensor",
    unless(has_plain_blocks, "this model calls its blocks otherwise: choose compile=blocks or compile=none"),
)
FEW_SHAPES = ModelFact(
    "batches have one shape, or one of a few",
    unless(
        lambda known: known.get(HAS_FEW_SHAPES),
        "here nearly every batch has its own shape: choose compile=blocks with compile.dynamic=true",
    ),
)


class Mode(Enum):
    """torch.compile's mode. (Those with CUDA graphs aren't offered: the next part would overwrite their outputs.)"""

    default = "default"
    max_autotune = "max-autotune-no-cudagraphs"


class Backend(Enum):
    """torch.compile's backend: what becomes of the graphs."""

    inductor = "inductor"  # code is written for them
    aot_eager = "aot_eager"  # they run operator by operator


@dataclass(frozen=True)
class Compiled(Knob):
    """Modules are compiled in place, at the first step. Parameters keep their names."""

    backend: Backend = Backend.inductor
    mode: Mode = Mode.default
    dynamic: bool | None = False

    stage = Stage.COMPILE
    exactness = Exactness.ROUNDING
    band = 1e-5
    extra_memory = True
    misfits: ClassVar[Mapping[str, str]] = {
        "does not currently support double backward|through the graph a second time": "gradients aren't differentiated"
        " again, as those of an energy's forces are: choose compile=none",
        # The graph that computes a block again has saved the buffers: torch's aot_eager keeps them, though unused.
        "has been modified by an inplace operation": "what a block writes into its own buffers, as BatchNorm does,"
        " isn't written again before its backward pass: compute each block once in a step, or choose ckpt=none,"
        " compile.backend=inductor or compile=none",
    }
    # A backward graph writes into what the forward graph has saved ("donated buffers"). torch has a setting against
    # that, but its cache of compiled graphs ignores the setting (2.13): a second backward pass may be wrong.
    breaks_always = frozenset({Fact.RETAINABLE_GRAPH, Fact.EVERY_OPERATOR, Fact.EAGER})

    def __post_init__(self) -> None:
        written = self.backend is Backend.inductor or self.mode is Mode.default
        require(written, "compile.mode", self.mode.name, "default with compile.backend=aot_eager, which writes no code")

    def needs(self) -> frozenset[Fact | ModelFact]:
        of_backend = {Fact.C_COMPILER} if self.backend is Backend.inductor else set[Fact]()
        return self.needs_always | of_backend | ({FEW_SHAPES} if self.dynamic is False else set())

    def apply(self, rig: Rig) -> Rig:
        torch.compiler.config.recompile_limit = RECOMPILE_LIMIT
        torch.compiler.config.fail_on_recompile_limit_hit = True  # by default torch silently goes on eagerly
        use_eager_random_numbers()
        use_numpys_generator()
        for module in self.modules(rig):
            module.compile(backend=self.backend.value, mode=self.mode.value, dynamic=self.dynamic)
        return rig

    @abstractmethod
    def modules(self, rig: Rig) -> list[nn.Module]:
        """The modules that are compiled, each by itself."""


@final
@dataclass(frozen=True)
class CompiledBlocks(Compiled):
    """Each block is compiled separately; blocks of the same kind share their code."""

    needs_always = frozenset({BLOCKS})

    def modules(self, rig: Rig) -> list[nn.Module]:
        return rig.structure.blocks


@final
@dataclass(frozen=True)
class CompiledModel(Compiled):
    """The whole model is compiled as one: the fastest code, which takes longest to compile."""

    # Else it would be compiled for each choice; and weights that wait elsewhere arrive between two blocks.
    needs_always = frozenset({Fact.SAME_PARAMS, Fact.EVERY_BLOCK, Fact.DEVICE_WEIGHTS})

    def modules(self, rig: Rig) -> list[nn.Module]:
        return [rig.model]


@final
@dataclass(frozen=True)
class TorchScript(Knob):
    """Each block is traced by torch.jit at its first step, and then run by TorchScript's interpreter."""

    stage = Stage.COMPILE
    exactness = Exactness.ROUNDING
    band = 1e-5
    extra_memory = True
    misfits: ClassVar[Mapping[str, str]] = {
        rf"(?s:\A(?!.*(?:{OF_VALUES})).*TorchScript)": "TorchScript can run the model's blocks: choose compile=blocks"
        " or compile=none",
    }
    breaks_always = frozenset({Fact.COMPILED, Fact.EAGER_AUTOGRAD, Fact.EAGER})

    def needs(self) -> frozenset[Fact | ModelFact]:
        # A trace keeps the parameters, control flow and shapes of the run that was recorded; torch.jit (2.13) fails in
        # torchao's rounding of weights.
        blocks = {BLOCKS, PLAIN_BLOCKS, Fact.FIXED_BLOCKS, STEADY_BLOCKS}
        return frozenset({*blocks, Fact.WHOLE_PARAMS, FEW_SHAPES, Fact.PLAIN_PRODUCTS})

    def apply(self, rig: Rig) -> Rig:
        print("note: PyTorch has deprecated TorchScript and doesn't fix it any more: prefer compile=blocks")
        for block in rig.structure.blocks:
            block.forward = Traced(block)
        return rig


@final
class Traced:
    """The forward pass of a block as TorchScript: one trace for each combination of the numbers and texts that its
    modules hold (train or eval is among them), grad mode, autocast, and shapes of the inputs."""

    def __init__(self, block: nn.Module) -> None:
        self.block, self.repeatable = block, Repeatable(block)
        self.own_forward = vars(block).get("forward")  # of this object alone
        self.traces: dict[Any, Any] = {}
        self.num_compared: dict[Any, int] = {}
        self.recorded: list[dict[str, Any]] = []  # what the modules held
        self.changes_buffers = False
        self.last: Callable[[], Pass | None] = lambda: None  # whose graph is alive

    def __call__(self, *inputs: Tensor) -> Any:
        autocast = number_format(inputs[0].device.type)
        shapes = tuple((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in inputs)
        held = held_by(self.block)
        key = (tuple(held.items()), torch.is_grad_enabled(), autocast, shapes)
        if key not in self.traces:
            self.note(held)
            self.traces[key], self.num_compared[key] = self.trace(inputs, autocast), 0
        elif self.num_compared[key] < NUM_COMPARED and not self.is_keeping_buffers():
            self.num_compared[key] += 1
            return self.compared(self.traces[key], inputs, autocast)
        return self.call(self.traces[key], inputs)

    def call(self, trace: Any, inputs: tuple[Tensor, ...]) -> Any:
        return self.once(trace, inputs) if self.is_keeping_buffers() else trace(*inputs)

    def is_keeping_buffers(self) -> bool:
        """Whether a call now would change buffers that TorchScript (2.13) keeps for the backward pass."""
        return self.changes_buffers and torch.is_grad_enabled() and self.block.training

    def note(self, held: dict[str, Any]) -> None:
        """Note what is recorded. Raises Incompatible where that changes time and again."""
        if held not in self.recorded:
            self.recorded.append(held)
        if len(self.recorded) > MOST_RECORDINGS:
            before = self.recorded[-2]
            name = next((name for name, value in held.items() if before.get(name) != value), "")
            raise Incompatible(
                f"compile=torchscript would record {type(self.block).__name__} anew for each value of its {name}, of"
                f" which there were {MOST_RECORDINGS} (choose compile=blocks or compile=none)"
            )

    def compared(self, trace: Any, inputs: tuple[Tensor, ...], autocast: torch.dtype | None) -> Any:
        """Call a trace, and see whether the block would still compute the same: it may read a number that somebody has
        changed since, such as one of a Python file. A block that draws is left out, as TorchScript may draw otherwise.

        Raises:
            Incompatible: it wouldn't.
        """
        first, again = self.repeatable.passes()
        with first:
            outputs = self.call(trace, inputs)
        if first.drawn:
            return outputs
        with again, self.untraced(), as_traced(inputs[0].device.type, autocast, itself):
            own = self.block(*map(example, inputs))
        pairs = zip(map(fingerprint, tensors_in(outputs)), map(fingerprint, tensors_in(own)), strict=True)
        if not all(one is None or other is None or one.is_same(other) for one, other in pairs):
            raise Incompatible(
                f"compile=torchscript: {type(self.block).__name__} doesn't compute any more what was recorded, as it"
                " reads something that has changed since, such as a number in a Python file (choose compile=blocks or"
                " compile=none)"
            )
        return outputs

    @contextmanager
    def untraced(self) -> Iterator[None]:
        """Inside it the block runs what it ran before it was traced."""
        del self.block.forward
        if self.own_forward is not None:
            self.block.forward = self.own_forward
        try:
            yield
        finally:
            self.block.forward = self

    def once(self, trace: Any, inputs: tuple[Tensor, ...]) -> Any:
        """Call a trace that changes buffers which are kept. A second call before the backward pass would make that
        fail. Raises Incompatible for such a call."""
        last = self.last()
        if last is not None and not last.is_over:
            raise Incompatible(
                f"compile=torchscript can't run {type(self.block).__name__} twice before its backward pass, as it"
                " changes buffers (choose compile=blocks or compile=none)"
            )
        outputs, this = trace(*inputs), Pass()
        if outputs.grad_fn is not None:
            outputs.grad_fn.register_hook(this.end)  # which keeps `this` as long as the graph
            self.last = ref(this)
        return outputs

    def trace(self, inputs: tuple[Tensor, ...], autocast: torch.dtype | None) -> Any:
        """Run the block once to record it. The run changes neither buffers nor the state of random generators. Saved
        tensor hooks of other knobs are replaced meanwhile, so that they aren't recorded.

        Raises:
            Incompatible: the trace would compute something else than the block.
        """
        first, saved = Repeatable(self.block).passes().first, set[torch.dtype]()
        reading = Reading()
        buffers = [(buffer, buffer.clone()) for buffer in self.block.buffers()]
        examples = tuple(map(example, inputs))

        def note(tensor: Tensor) -> Tensor:
            saved.add(tensor.dtype)
            return tensor

        surroundings = as_traced(inputs[0].device.type, autocast, note)
        try:
            with self.untraced(), surroundings, warnings.catch_warnings(), first:
                warnings.simplefilter("ignore")  # deprecation (`apply` says it); constant shapes (in the key)
                with reading, torch.no_grad():  # not while it is traced, as the tracer reads shapes in this way, too
                    self.block(*examples)
                trace = torch.jit.trace(self.block, examples, check_trace=False)
        finally:
            restore(first.drawn)
            self.changes_buffers |= any(not torch.equal(buffer, value) for buffer, value in buffers)
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
        self.check(first, saved, reading.has_read)
        return trace

    def check(self, first: First, saved: Collection[torch.dtype], has_read: bool) -> None:
        """Refuse a block that changes more than buffers in place, draws from other generators than torch's own, or
        reads numbers from tensors, as `if` does: its trace would repeat what it recorded. And one with complex numbers:
        TorchScript's (2.13) gradients of products don't conjugate them."""
        buffers = [id(own_buffers(module)) for module in self.block.modules()]
        changed = (each for each in first.changes if not is_in_place(each, buffers))
        reasons = [f"{each.what} changes in each forward pass" for each in changed]
        recorded = [source.generator for source in global_sources() if isinstance(source, OfTorch)]
        drawn = (source for source, _ in first.drawn if getattr(source, "generator", None) not in recorded)
        reasons += [f"it draws from {source.name}" for source in drawn]
        reasons += ["its code reads numbers from tensors (item(), if, float())"] if has_read else []
        reasons += ["it computes with complex numbers"] if any(dtype.is_complex for dtype in saved) else []
        if reasons:
            raise Incompatible(
                f"compile=torchscript can't record {type(self.block).__name__}: {', '.join(reasons)} (choose"
                " compile=blocks or compile=none)"
            )


def held_by(block: nn.Module) -> dict[str, Any]:
    """The numbers and texts that a block's modules hold, each with its type: 1 isn't True."""
    return {
        f"{place}.{name}".lstrip("."): (type(value), value)
        for place, module in block.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, RECORDED)
        or (isinstance(value, tuple) and all(isinstance(each, RECORDED) for each in value))
    }


def tensors_in(outputs: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]


def example(tensor: Tensor) -> Tensor:
    """An input of the same values, without the graph that leads to it."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


@contextmanager
def as_traced(device_type: str, autocast: torch.dtype | None, note: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """The surroundings of a trace: without autocast's cache, as a cached cast of a weight would be recorded as a
    constant, and without the saved tensor hooks of other knobs."""
    plain = torch.autocast(device_type, autocast, enabled=autocast is not None, cache_enabled=False)
    with plain, saved_tensors_hooks(note, itself):
        yield


class Reading(TorchDispatchMode):
    """Notes whether Python reads a number from a tensor."""

    has_read = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.has_read |= func is CopyOps.NUMBER.default
        return func(*args, **(kwargs or {}))


class Pass:
    """One call of a block, until its backward pass."""

    is_over = False

    def end(self, *gradients: Any) -> None:
        self.is_over = True


def is_in_place(change: Change, owners: Collection[int]) -> bool:
    """Whether a tensor changed in place that one of these dictionaries, by their ids, holds."""
    return isinstance(change, OfEntry) and change.is_copied and id(change.owner) in owners


def itself(tensor: Tensor) -> Tensor:
    return tensor


def number_format(device_type: str) -> torch.dtype | None:
    """The dtype of autocast; None if it is off."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
