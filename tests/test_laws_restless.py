"""Knobs that run a forward pass twice, over blocks that draw, that change what they hold, or that write in place.

Each is held against a plain loop of torch: the weights after some steps, the buffers and all else that blocks hold. So
the gradient belongs to the loss that was computed, and each draw and each change happens once. Where a knob draws
otherwise, as those do that cut a part, the derivative of the step's own loss is measured by finite differences.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowvram
from lowvram.config.errors import Incompatible
from lowvram.core.generators import seed_all
from tests import restless
from tests.laboratory import CPU, needs_gpu, needs_real_gpu
from tests.restless import BLOCKS, CHANGING, CLASSES, DRAWING, WIDTH, Net
from tests.tiers import first_of

BATCH, STEPS, LR = 6, 3, 0.05
SGD = f"optimizer=sgd optimizer.lr={LR} optimizer.momentum=0 optimizer.weight_decay=0"
# Knobs under which a step draws as without them, and changes what blocks hold as often.
SAME = [
    "ckpt=every1",
    "ckpt=selective",
    "ckpt=sqrt",
    "ckpt=every2",
    "ckpt=sqrt ckpt.segment=3",
    "ckpt=auto",
    "ckpt=every1 stepping=in_backward",
    "ckpt=every1 stepping=in_backward stepping.clip=1e9 stepping.norm=two_passes",
    "ckpt=sqrt stepping=in_backward stepping.clip=1e9 stepping.norm=two_passes",
    "ckpt=selective stepping=in_backward stepping.clip=1e9 stepping.norm=two_passes",
    "ckpt=every1 offload=activations",
    "ckpt=sqrt offload=activations",
    "ckpt=every1 accum=x2",
]
IN_PARTS = ["tile=blocks", "tile=blocks tile.samples=4", "ckpt=every1 tile=blocks"]


@pytest.fixture(autouse=True)
def in_double() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(BATCH, WIDTH, generator=draw), torch.randint(CLASSES, (BATCH,), generator=draw))
        for _ in range(STEPS)
    ]


def made(block: Callable[[], nn.Module]) -> Net:
    seed_all(0)
    restless.GLOBAL_RANDOM.bit_generator.state = type(restless.GLOBAL_RANDOM.bit_generator)(0).state
    return Net(block)


def plain(block: Callable[[], nn.Module], num_parts: int, device: torch.device) -> tuple[nn.Module, list[float]]:
    """A plain loop."""
    model, losses = made(block).to(device), list[float]()
    for step, (x, y) in enumerate(batches()):
        seed_all(step)
        x, y = x.to(device), y.to(device)
        model.zero_grad()
        of_parts = list[float]()
        for xs, ys in zip(x.chunk(num_parts), y.chunk(num_parts), strict=True):
            loss = F.cross_entropy(model(xs), ys, reduction="sum") / BATCH
            loss.backward()
            of_parts.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= LR * (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        losses.append(sum(of_parts))
    return model, losses


def sum_of_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="sum")


def assembled(model: Net, knobs: str, device: torch.device = CPU) -> lowvram.Rig:
    name = type(model.blocks[0]).__name__
    return lowvram.assemble(lowvram.task(model, batches()[0][0], sum_of_losses, blocks=name), f"{SGD} {knobs}", device)


def trained(block: Callable[[], nn.Module], knobs: str, device: torch.device = CPU) -> tuple[nn.Module, list[float]]:
    """The same by lowvram's step."""
    model, losses = made(block).to(device), list[float]()
    rig = assembled(model, knobs, device)
    for step, (x, y) in enumerate(batches()):
        seed_all(step)
        losses.append(lowvram.step(rig, lowvram.Part(x, y).to(device))[0].item())
    return model, losses


def values_in(model: nn.Module) -> dict[str, Any]:
    """The numbers in attributes of blocks."""
    return {
        f"{place}.{name}": deepcopy(value)
        for place, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, int | float | dict) and not name.startswith("_") and name != "training"
    }


def check_same(name: str, knobs: str, device: torch.device = CPU) -> None:
    num_parts = 2 if "accum=x2" in knobs else 1
    wanted, wanted_losses = plain(BLOCKS[name], num_parts, device)
    found, losses = trained(BLOCKS[name], knobs, device)
    assert losses == pytest.approx(wanted_losses, rel=1e-12)
    assert values_in(found) == values_in(wanted)
    state = found.state_dict()
    for key, value in wanted.state_dict().items():
        assert torch.allclose(state[key].to(torch.float64), value.to(torch.float64), rtol=1e-9, atol=1e-12), key


@pytest.mark.parametrize("knobs", ["ckpt=every1", "ckpt=selective", "ckpt=sqrt"])
@pytest.mark.parametrize("device", [pytest.param(torch.device("cuda"), marks=[*needs_gpu, needs_real_gpu])])
def test_a_step_on_a_card_is_that_of_a_plain_loop(knobs: str, device: torch.device) -> None:
    for name in BLOCKS.keys() - {"OwnGenerator"}:  # the CPU's
        check_same(name, knobs, device)


# Each block under the simplest knob, and under two others each knob with a few of the blocks, first.
QUICK = [(knobs, name) for i, knobs in enumerate(SAME[:3]) for name in list(BLOCKS)[:: 4 if i else 1]]
OTHERS = [(knobs, name) for knobs in SAME for name in BLOCKS if (knobs, name) not in QUICK]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("knobs", "name"), first_of([*QUICK, *OTHERS], len(QUICK)))
def test_a_step_is_that_of_a_plain_loop(knobs: str, name: str) -> None:
    check_same(name, knobs)


class Timed(restless.Mlp):
    """A block that is called several times, and told beforehand how."""

    scale = 1.0

    def between(self, x: Tensor) -> Tensor:
        return x * self.scale


class TimedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Timed(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for time in range(3):
            self.block.scale = 1.0 - 0.3 * time
            x = self.block(x)
        return self.head(x)


@pytest.mark.parametrize("knobs", ["ckpt=every1", "ckpt=selective"])
def test_a_block_is_computed_again_as_it_was_told_when_it_was_called(knobs: str) -> None:
    (x, y), *_ = batches()
    seed_all(0)
    model = TimedNet()
    loss = F.cross_entropy(model(x), y)
    wanted = torch.autograd.grad(loss, list(model.parameters()))
    rig = lowvram.assemble(lowvram.task(model, x, sum_of_losses, blocks="Timed"), f"{SGD} {knobs}", CPU)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    lowvram.step(rig, lowvram.Part(x, y))
    for parameter, value, gradient in zip(model.parameters(), before, wanted, strict=True):
        assert torch.allclose(value - LR * gradient, parameter, rtol=1e-9, atol=1e-12)
    assert model.block.scale == pytest.approx(0.4)


def test_what_cannot_be_put_back_is_refused() -> None:
    """Of blocks that are computed again."""

    class InTuple(restless.Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.held = (torch.ones(()),)

        def between(self, x: Tensor) -> Tensor:
            self.held[0].mul_(0.9)
            return x * self.held[0].clone()

    class OthersTensor(restless.Sharing):
        def between(self, x: Tensor) -> Tensor:
            if self.is_writing:
                self.shared.kv = torch.ones(()) if self.shared.kv is None else self.shared.kv.mul_(0.9)
            return x * self.shared.kv.clone()

    for block, match in (
        (InTuple, "a tensor in a tuple"),
        (OthersTensor, "OthersTensor.shared was changed in place after"),
    ):
        restless.BLOCKS[block.__name__] = block
        try:
            with pytest.raises(Incompatible, match=match):
                trained(block, "ckpt=every1")
        finally:
            del restless.BLOCKS[block.__name__]


def derivatives(name: str, knobs: str) -> tuple[float, float]:
    """Of a step's loss along a direction: by finite differences of the loss that the step returns, and by its
    update."""
    x, y = batches()[0]
    model = made(BLOCKS[name])
    rig = assembled(model, knobs)
    parameters, draw = list(model.parameters()), torch.Generator().manual_seed(5)
    before = [parameter.detach().clone() for parameter in parameters]
    direction = [torch.randn(parameter.shape, generator=draw) for parameter in parameters]

    def loss_at(eps: float) -> float:
        with torch.no_grad():
            for parameter, value, along in zip(parameters, before, direction, strict=True):
                parameter.copy_(value + eps * along)
        seed_all(7)
        restless.GLOBAL_RANDOM.bit_generator.state = type(restless.GLOBAL_RANDOM.bit_generator)(0).state
        for module in model.modules():
            for attribute, made_again in OWN.items():
                if hasattr(module, attribute) and type(module).__name__.startswith("Own"):
                    setattr(module, attribute, made_again[type(module).__name__]())
        return lowvram.step(rig, lowvram.Part(x, y))[0].item()

    loss_at(0.0)
    updates = [(value - parameter.detach()) / LR for value, parameter in zip(before, parameters, strict=True)]
    by_update = sum(float((update * along).sum()) for update, along in zip(updates, direction, strict=True))
    return (loss_at(1e-6) - loss_at(-1e-6)) / 2e-6, by_update


OWN: dict[str, dict[str, Callable[[], Any]]] = {
    "draws": {
        "OwnGenerator": lambda: restless.OwnGenerator().draws,
        "OwnNumpy": lambda: restless.OwnNumpy().draws,
        "OwnPython": lambda: restless.OwnPython().draws,
    }
}
# Trials of how blocks treat samples take a copy, and torch can't copy a generator: such a block is refused.
STEADY = [name for name in DRAWING if name not in CHANGING and name != "OwnGenerator"]
DETACHED = {
    "OwnNorm",
    "Ema",
    "WrittenThroughData",
    "LargeEma",
    "OldSpectral",
}  # what no gradient sees changes their losses


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("knobs", "name"), first_of([(knobs, name) for knobs in IN_PARTS for name in STEADY], len(STEADY))
)
def test_a_gradient_in_parts_is_that_of_the_loss(knobs: str, name: str) -> None:
    by_differences, by_update = derivatives(name, knobs)
    assert by_update == pytest.approx(by_differences, rel=1e-5, abs=1e-7)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CHANGING)
def test_a_block_that_changes_in_each_pass_is_not_cut(name: str) -> None:
    """It would change once for each part: refused when the rig is assembled, or in the first step."""
    with pytest.raises(
        Incompatible, match=f"{name}|{BLOCKS[name]().__class__.__name__}|Norm|Spectral|that sample alone"
    ):
        trained(BLOCKS[name], "tile=blocks")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", BLOCKS)
def test_both_passes_of_zeroth_order_draw_the_same(name: str) -> None:
    """The slope is the derivative of the loss of one draw, and what blocks hold changes as in one forward pass."""
    x, y = batches()[0]
    model, wanted = made(BLOCKS[name]), made(BLOCKS[name])
    rig = assembled(model, "stepping=zeroth_order stepping.eps=1e-5")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    made(BLOCKS[name])  # sets the generators back
    seed_all(7)
    mean, update = lowvram.step(rig, lowvram.Part(x, y))
    made(BLOCKS[name])
    seed_all(7)
    loss = F.cross_entropy(wanted(x), y)
    gradients = torch.autograd.grad(loss, list(wanted.parameters()), materialize_grads=True)
    moves = [(value - parameter.detach()) / LR for value, parameter in zip(before, model.parameters(), strict=True)]
    square = sum(float((move**2).sum()) for move in moves)  # of slope * direction
    product = sum(float((move * gradient).sum()) for move, gradient in zip(moves, gradients, strict=True))
    assert float(mean) == pytest.approx(float(loss.detach()), abs=1e-7)
    if name not in DETACHED:  # slope * direction * gradient = slope**2
        assert product == pytest.approx(float(update.grad_norm) ** 2, rel=1e-3, abs=1e-9)
    assert square > 0
    assert values_in(model) == values_in(wanted)
    for (key, found), (_, value) in zip(model.named_buffers(), wanted.named_buffers(), strict=True):
        assert torch.allclose(found.double(), value.double(), rtol=1e-3, atol=1e-4), key


@pytest.mark.usefixtures("compiled_quickly")
@pytest.mark.parametrize(
    ("knobs", "nth"), first_of([("ckpt=every1", 4), ("ckpt=every1", 1), ("ckpt=selective", 1), ("tile=blocks", 1)])
)
def test_compiled_blocks_that_cannot_be_repeated_are_refused(knobs: str, nth: int) -> None:
    """Each n-th of them."""
    steady = {"FunctionalDropout", "DropPath", "Noise", "RandomRelu", "AttentionDropout", "FusedDropout"}
    compiled = f"{knobs} compile=blocks compile.backend=aot_eager"
    for name in sorted({*DRAWING, *CHANGING} - steady)[::nth]:
        with pytest.raises(Incompatible, match=r"in a compiled model needs blocks|that sample alone|sample by itself"):
            assembled(made(BLOCKS[name]), compiled)
    for name in sorted(steady)[::nth]:
        assembled(made(BLOCKS[name]), compiled)


@pytest.mark.usefixtures("compiled_quickly")
@pytest.mark.parametrize("option", ["blocks", "model"])
def test_what_torch_would_compile_wrongly_is_refused(option: str) -> None:
    """Of torch 2.13: draws that are the same in each step, and gradients of what a tensor holds only afterwards."""
    for name in ("OwnPython", "Ema", "LargeEma", "PlainTensor", "TensorInList"):
        with pytest.raises(
            Incompatible, match=rf"torch\.compile would get this model wrong .* {name}[ .].*compile=none"
        ):
            assembled(made(BLOCKS[name]), f"compile={option} compile.backend=aot_eager")


@pytest.mark.usefixtures("compiled_quickly")
@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore")  # of torch.compile, about itself
@pytest.mark.parametrize(
    ("knobs", "names"),
    [
        ("", ["NumpyMask", "OwnGenerator", "InstanceNorm"]),
        ("ckpt=selective", ["Gru", "Rnn", "RecurrentNorm"]),
        ("ckpt=every1", ["RecurrentNorm"]),
    ],
)
def test_a_compiled_step_is_that_of_a_plain_loop(knobs: str, names: list[str]) -> None:
    """torch would draw numpy's numbers by itself, keep what a kernel changes in place, and count statistics twice."""
    for name in names:
        check_same(name, f"{knobs} compile=blocks compile.backend=aot_eager")


class CountingNorm(nn.BatchNorm1d):
    """As timm's norms, whose own forward pass counts the batches."""

    def forward(self, input: Tensor) -> Tensor:
        assert self.num_batches_tracked is not None
        if self.training:
            self.num_batches_tracked.add_(1)
        return F.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1, self.eps
        )


class OwnClassNorm(restless.Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.norm = CountingNorm(WIDTH)

    def between(self, x: Tensor) -> Tensor:
        return self.norm(x)


@pytest.mark.usefixtures("compiled_quickly")
@pytest.mark.filterwarnings("ignore")
def test_a_batch_norm_of_a_class_of_its_own_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(restless.BLOCKS, "OwnClassNorm", OwnClassNorm)
    for option in ("blocks", "model"):
        check_same("OwnClassNorm", f"compile={option} compile.backend=aot_eager")


def test_a_trial_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """What torch can't do without memory is no error of the run."""
    for name in ("OldSpectral", "TensorInList"):
        assembled(made(BLOCKS[name]), "ckpt=sqrt")
    assert caplog.records == []
