"""compile: numbers of the code that inductor writes, how many graphs there are, and what compiled code can't do.

The laws run every pair of options on graphs without inductor (backend "aot_eager"); those tests here that say nothing
else use inductor itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch.autograd.graph import saved_tensors_hooks

import lowvram
from lowvram.config.errors import BadInput, Incompatible
from lowvram.core.assemble import assemble
from lowvram.core.fact import Fact
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob
from lowvram.core.ledger import ledger
from lowvram.core.rig import Rig
from lowvram.core.step import step
from lowvram.knobs.ckpt import CompilerBudget, RecomputeEvery, RecomputeSegments
from lowvram.knobs.compile import Backend, CompiledBlocks, Mode, TorchScript
from lowvram.tasks import Auto
from tests import restless
from tests.laboratory import (
    COMPILING_DEVICES,
    CPU,
    IMAGES,
    KNOBS,
    PROBLEMS,
    RESNET,
    TOKENS,
    TRANSFORMER,
    InDouble,
    compiler_as_before,
    knobs_of,
    make_batch,
    needs_gpu,
    needs_real_gpu,
    relative_error,
    train,
)
from tests.tiers import first_of

pytestmark = pytest.mark.medium

TASKS = {  # of one block: the code of a whole model takes seconds to compile
    "transformer": Auto().pose(replace(TRANSFORMER, num_layers=1), TOKENS),
    "resnet": Auto().pose(replace(RESNET, layers=[1]), IMAGES),
}
BATCH_SIZE = 8


@pytest.fixture(autouse=True)
def compiler_afterwards() -> Iterator[None]:
    torch.compiler.reset()
    with compiler_as_before():
        yield


def without_inductor() -> Any:
    """Graphs are made and cut in two, but run operation by operation."""
    return torch.compiler.set_stance("default", force_backend="aot_eager")


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


# Fields


def test_graphs_without_written_code_need_no_compiler_and_have_no_mode() -> None:
    knob = CompiledBlocks(backend=Backend.aot_eager)
    assert Fact.C_COMPILER not in knob.needs()
    assert Fact.C_COMPILER in CompiledBlocks().needs()
    with pytest.raises(BadInput, match=r"compile\.mode='max_autotune': must be default"):
        CompiledBlocks(backend=Backend.aot_eager, mode=Mode.max_autotune)


def test_the_backend_that_is_named_gets_the_graphs() -> None:
    before, of_inductor = num_graphs(), counters["inductor"].copy()  # also those of tests before
    train(TASKS["transformer"], knobs_of(compile=CompiledBlocks(backend=Backend.aot_eager)), [BATCH_SIZE])
    assert num_graphs() > before
    assert counters["inductor"] == of_inductor


# Numbers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "problem", "precision", "factor"),
    [
        ("blocks", "transformer", "fp32", 10),
        ("blocks", "transformer", "bf16", 1.1),
        ("blocks", "resnet", "fp32", 10),
        ("model", "transformer", "fp32", 10),
    ],
)
def test_inductors_error_is_as_small_as_an_eager_models(
    option: str, problem: str, precision: str, factor: float
) -> None:
    wanted = train(InDouble(TASKS[problem]), knobs_of(), [BATCH_SIZE]).gradients
    before = num_graphs()
    compiled, eager = (
        relative_error(train(TASKS[problem], knobs_of(compile=which, precision=precision), [8]).gradients, wanted)
        for which in (option, "none")
    )
    assert num_graphs() > before
    assert 0 < compiled <= factor * eager


@pytest.mark.parametrize("is_inductor", first_of([False, True]), ids=["aot_eager", "inductor"])
def test_batchnorm_counts_once_what_a_compiled_block_computes_again(is_inductor: bool) -> None:
    before = num_graphs()
    with nullcontext() if is_inductor else without_inductor():
        found, wanted = (
            train(TASKS["resnet"], knobs_of(compile="blocks", ckpt=ckpt, optimizer="sgd"), [BATCH_SIZE] * 3)
            for ckpt in ("every1", "none")
        )
    assert num_graphs() - before == 2
    assert relative_error(found.buffers, wanted.buffers) == 0
    assert relative_error(found.gradients, wanted.gradients) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("device", COMPILING_DEVICES, ids=str)
def test_what_is_computed_again_has_the_same_dropout(device: torch.device) -> None:
    """A gradient of another mask than the loss's would not be its slope."""
    task = InDouble(PROBLEMS["transformer_dropout"])
    rig = assemble(task, knobs_of(compile="blocks", ckpt="every1"), device)
    batch = make_batch(task.spec, BATCH_SIZE).to(device)

    def loss() -> Tensor:
        torch.manual_seed(0)
        return rig.criterion(rig.forward(batch), batch)

    loss().backward()
    gradients = [parameter.grad.clone() for parameter in rig.model.parameters() if parameter.grad is not None]
    slope = sum(float(gradient.square().sum()) for gradient in gradients)
    there, back = (float(moved(rig, gradients, sign * 1e-7, loss)) for sign in (1, -1))
    assert (there - back) / 2e-7 == pytest.approx(slope, rel=1e-4)


def moved(rig: Rig, directions: list[Tensor], by: float, loss: Any) -> Tensor:
    """The loss a little way off."""
    held = [parameter.detach().clone() for parameter in rig.model.parameters()]
    with torch.no_grad():
        for parameter, direction in zip(rig.model.parameters(), directions, strict=True):
            parameter.add_(direction, alpha=by)
    value = loss().detach()
    with torch.no_grad():
        for parameter, old in zip(rig.model.parameters(), held, strict=True):
            parameter.copy_(old)
    return value


@pytest.mark.gpu
@needs_gpu[1]
@needs_real_gpu
def test_dropout_masks_of_neighbours_differ_on_a_card() -> None:
    """With inductor's own random numbers four neighbours share one (torch 2.13, pytorch#198333)."""
    inductor_config.fallback_random = assembled_setting()

    def masked(x: Tensor) -> Tensor:
        return nn.functional.dropout(x.transpose(1, 2).contiguous(), 0.5)

    mask = torch.compile(masked)(torch.ones(8, 64, 4096, device="cuda")) != 0
    assert mask.float().mean().item() == pytest.approx(0.5, abs=0.01)
    same = (mask[..., 0::4] == mask[..., 1::4]).float().mean().item()
    assert same == pytest.approx(0.5, abs=0.01)


def assembled_setting() -> bool:
    """What the knob sets."""
    assemble(TASKS["transformer"], knobs_of(compile="blocks"), CPU)
    return inductor_config.fallback_random


# Graphs


@pytest.mark.parametrize(("ckpt", "num_kinds"), first_of([("every2", 2), ("none", 1), ("every1", 1)]))
def test_blocks_of_a_kind_share_one_graph_for_each_shape(ckpt: str, num_kinds: int) -> None:
    """Training in parts, evaluation, and an evaluation's smaller last batch."""
    task = PROBLEMS["transformer_dropout"]
    with without_inductor():
        before, found, breaks = num_graphs(), [], counters["graph_break"].total()
        rig = assemble(task, knobs_of(compile="blocks", ckpt=ckpt, accum="x4"), CPU)
        for size, is_training in ((32, True), (32, True), (8, False), (3, False), (32, True), (8, False)):
            rig.model.train(is_training)
            if is_training:
                step(rig, make_batch(task.spec, size))
            else:
                with torch.no_grad():
                    rig.forward(make_batch(task.spec, size))
            found.append((num_graphs() - before) / num_kinds)
    assert found == [1, 1, 2, 3, 3, 3]
    assert counters["graph_break"].total() == breaks


def test_a_whole_model_is_one_graph() -> None:
    with without_inductor():
        before = num_graphs()
        rig = assemble(TASKS["resnet"], knobs_of(compile="model", ckpt="every1"), CPU)
        step(rig, make_batch(IMAGES, BATCH_SIZE))
    assert num_graphs() - before == 1


@pytest.mark.slow
def test_dynamic_shapes_are_one_graph() -> None:
    task = PROBLEMS["transformer"]
    with without_inductor():
        before = num_graphs()
        train(task, knobs_of(compile=CompiledBlocks(dynamic=True)), [9, 5])
    assert num_graphs() - before == 1


def test_too_many_graphs_are_an_error_not_an_eager_run() -> None:
    task = PROBLEMS["transformer"]
    with without_inductor():
        rig = assemble(task, knobs_of(compile="blocks"), CPU)
        dynamo_config.recompile_limit = 1
        step(rig, make_batch(task.spec, 4))
        with pytest.raises(FailOnRecompileLimitHit):
            step(rig, make_batch(task.spec, 5))


# What compiled code can't do


@pytest.mark.parametrize("option", ["blocks", "model"])
def test_without_retainable_graph(option: str) -> None:
    """A second backward pass is an error of torch's, once the backward graph is there."""
    task = TASKS["transformer"]
    with without_inductor():
        rig, batch = assemble(task, knobs_of(compile=option), CPU), make_batch(task.spec, BATCH_SIZE)
        step(rig, batch)
        loss = rig.criterion(rig.forward(batch), batch)
        with pytest.raises(RuntimeError, match="donated buffers"):
            loss.backward(retain_graph=True)


def activations(rig: Rig) -> int:
    """The largest sum of them in a step, in bytes."""
    batch = make_batch(rig.task.spec, BATCH_SIZE)  # pyright: ignore[reportAttributeAccessIssue]
    with ledger(rig.model, rig.stepper, batch.tensors()) as peak:
        step(rig, batch)
    return peak.by_kind_max[Kind.ACTIVATIONS]


def test_without_compiled() -> None:
    """The compiler's budget is nobody's."""
    plain, budget = (assemble(PROBLEMS["transformer"], knobs_of(), CPU) for _ in range(2))
    assert CompilerBudget(0.0).apply(budget) is budget
    assert activations(budget) == activations(plain)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch.compile, about itself
@pytest.mark.parametrize("option", ["blocks", "model"])
def test_without_eager(option: str) -> None:
    """torch.compile can't follow which block has made an input of the next one, and breaks its graphs at each block."""
    task = PROBLEMS["transformer"]
    with without_inductor():
        rig = assemble(task, knobs_of(), CPU)
        KNOBS["compile", option].apply(RecomputeSegments().apply(rig))
        counters.clear()
        step(rig, make_batch(task.spec, BATCH_SIZE))
        assert counters["graph_break"]


@pytest.mark.parametrize("knob", [RecomputeEvery(), RecomputeSegments()], ids=lambda knob: type(knob).__name__)
def test_without_eager_autograd(knob: Knob) -> None:
    """A trace of a block that is to be computed again keeps all of its activations."""
    plain, again, traced = (assemble(PROBLEMS["transformer"], knobs_of(), CPU) for _ in range(3))
    for rig in (again, traced):
        knob.apply(rig)
    TorchScript().apply(traced)
    step(traced, make_batch(PROBLEMS["transformer"].spec, BATCH_SIZE))
    assert activations(again) < 0.7 * activations(plain)
    assert activations(traced) > 0.9 * activations(plain)


def test_without_every_operator() -> None:
    """What a compiled block saves needs no gradient: an activation can't be told from a mask or a sum's logarithm."""
    saved: list[bool] = []
    rig = assemble(TASKS["transformer"], knobs_of(), CPU)
    (block, *_), x = rig.structure.blocks, torch.randn(4, 8, 16, requires_grad=True)

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor.requires_grad and not isinstance(tensor, nn.Parameter) and tensor is not x)
        return tensor

    def num_activations() -> int:
        saved.clear()
        with saved_tensors_hooks(note, lambda tensor: tensor):
            block(x)
        return sum(saved)

    assert num_activations() > 5
    block.compile(backend="aot_eager")
    num_activations()  # compiles
    assert num_activations() == 0


# TorchScript


@pytest.mark.sampled(3)
@pytest.mark.parametrize("offload", ["none", "activations"])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_trace_has_the_numbers_of_an_eager_model(problem: str, offload: str) -> None:
    """With dropout and BatchNorm too: recording draws no random numbers and counts no batch. Nor does it record what
    offloading hooks into autograd."""
    choices: dict[str, str | Knob] = {"optimizer": "sgd", "accum": "x2", "offload": offload}
    found, wanted = (
        train(PROBLEMS[problem], knobs_of(compile=which, **choices), [8, 8, 7], lr=0.01)
        for which in ("torchscript", "none")
    )
    assert relative_error(found.gradients, wanted.gradients) <= 1e-6
    assert relative_error(found.buffers, wanted.buffers) <= 1e-6


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("problem", TASKS)
def test_a_trace_follows_autocast(problem: str, precision: str) -> None:
    wanted = train(InDouble(TASKS[problem]), knobs_of(), [BATCH_SIZE]).gradients
    traced, eager = (
        relative_error(train(TASKS[problem], knobs_of(compile=which, precision=precision), [8]).gradients, wanted)
        for which in ("torchscript", "none")
    )
    assert 1e-4 < traced <= 1.1 * eager


class Filter(restless.Mlp):
    """Multiplies frequencies by complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(restless.WIDTH // 2 + 1, dtype=torch.cfloat))

    def between(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.weights, n=restless.WIDTH)


class Gated(restless.Mlp):
    """Goes a way that depends on the values."""

    def between(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else x * 2


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (Filter, "it computes with complex numbers"),
        (restless.Counter, "Counter.steps changes in each forward pass"),
        (restless.NestedState, "NestedState.state"),
        (restless.OwnNorm, "OwnNorm.mean changes"),
        (restless.NumpyScale, "it draws from numpy's generator"),
        (restless.PythonNormal, "it draws from Python's generator"),
        (restless.CumulativeNorm, "its code reads numbers"),
        (Gated, "its code reads numbers"),
    ],
)
def test_what_a_trace_would_repeat_as_it_was_recorded_is_refused(block: type[nn.Module], reason: str) -> None:
    inputs = torch.randn(4, restless.WIDTH)
    task = lowvram.task(restless.Net(block), inputs, blocks=block.__name__)
    with pytest.raises(Incompatible, match=f"compile=torchscript can't record {block.__name__}: .*{reason}"):
        lowvram.step(lowvram.assemble(task, "compile=torchscript", "cpu"), lowvram.Part(inputs, torch.arange(4)))


class Recurring(nn.Module):
    """A block with statistics, called as often as told, with a layer behind it."""

    def __init__(self, num_calls: int) -> None:
        super().__init__()
        self.block, self.head = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), nn.Linear(6, 3)
        self.num_calls = num_calls

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.num_calls):
            x = x + self.block(x)
        return self.head(x)


def test_a_trace_with_statistics_runs_once_before_its_backward_pass() -> None:
    inputs, targets = torch.randn(8, 6), torch.randint(3, (8,))

    def rig(num_calls: int, words: str) -> Any:
        task = lowvram.task(Recurring(num_calls), inputs, blocks="Sequential")
        return lowvram.assemble(task, words, "cpu")

    with pytest.raises(Incompatible, match="torchscript can't run Sequential twice before its backward pass"):
        lowvram.step(rig(2, "compile=torchscript"), lowvram.Part(inputs, targets))
    once = rig(1, "compile=torchscript accum=x2")
    kept = [lowvram.step(once, lowvram.Part(inputs, targets)) for _ in range(3)]  # losses that are held on to
    for _ in range(2):
        once.model(inputs)  # without a backward pass
    assert len(kept) == 3
    lowvram.step(once, lowvram.Part(inputs, targets))


def test_a_traced_model_evaluates_and_says_that_torchscript_is_retired(capsys: pytest.CaptureFixture[str]) -> None:
    task, batch = PROBLEMS["transformer_dropout"], make_batch(PROBLEMS["transformer"].spec, 4)
    rig, plain = (assemble(task, knobs_of(compile=which), CPU) for which in ("torchscript", "none"))
    assert capsys.readouterr().out.count("PyTorch has deprecated TorchScript") == 1
    rig.forward(batch)
    for model in (rig.model, plain.model):
        model.eval()
    with torch.no_grad():
        assert torch.equal(rig.forward(batch), plain.forward(batch))


class Scaled(nn.Module):
    """Multiplies by a number that its model sets."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x)) * self.scale


class OfFile(Scaled):
    """The same with a number that nobody sees."""

    def __init__(self) -> None:
        super().__init__()
        self.held: Any = lambda: SCALES.scale

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x)) * self.held()


class Scales:
    __slots__ = ("scale",)


SCALES = Scales()


class Scaling(nn.Module):
    """Sets the number anew in each forward pass, one after the other of some."""

    def __init__(self, block: type[Scaled], num_scales: int) -> None:
        super().__init__()
        self.blocks, self.num_scales, self.num_calls = nn.ModuleList([block(), block()]), num_scales, 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        SCALES.scale = 0.5 ** (self.num_calls % self.num_scales)
        for block in self.blocks:
            if type(block) is Scaled:
                block.scale = SCALES.scale
            x = block(x)
        return x


def scaled_losses(block: type[Scaled], num_scales: int, option: str, num_steps: int) -> list[float]:
    torch.manual_seed(0)
    model = Scaling(block, num_scales)
    inputs, targets = torch.randn(6, 4), torch.arange(6) % 4
    rig = lowvram.assemble(lowvram.task(model, inputs), f"compile={option} optimizer=sgd optimizer.lr=0.1", "cpu")
    return [float(lowvram.step(rig, lowvram.Part(inputs, targets))[0]) for _ in range(num_steps)]


def test_a_block_is_recorded_anew_for_other_numbers() -> None:
    wanted, found = (scaled_losses(Scaled, 3, option, 7) for option in ("none", "torchscript"))
    assert found == pytest.approx(wanted, rel=1e-5)
    with pytest.raises(
        Incompatible, match=r"would record Scaled anew for each value of its scale, of which there were 8"
    ):
        scaled_losses(Scaled, 20, "torchscript", 12)


def test_a_block_that_no_longer_computes_what_was_recorded_is_refused() -> None:
    with pytest.raises(Incompatible, match=r"^compile=torchscript: OfFile doesn't compute any more what was recorded"):
        scaled_losses(OfFile, 3, "torchscript", 4)
