"""Where a model's code doesn't fit a knob, the step refuses it in one sentence with torch's words."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import count
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import lowvram
from lowvram.config.errors import Incompatible
from lowvram.core.misfits import of_format, with_reasons
from lowvram.core.troubles import is_out_of_memory
from lowvram.knobs.compile import TorchScript
from tests.raising import raising_as_c

WIDTH = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


class InSingle(Net):
    """Multiplies by numbers in fp32 of its own."""

    def forward(self, x: Tensor) -> Any:
        return torch.cdist(super().forward(x), x)


class Forces(Net):
    """Returns derivatives by its inputs."""

    def forward(self, x: Tensor) -> Any:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(super().forward(x).square().sum(), x, create_graph=True)[0]


class Positions(Net):
    """Adds a table in fp32 that isn't saved, and so stays in fp32, as models with sines for positions do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("table", torch.randn(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Any:
        return self.norm(super().forward(x) + self.table)


class TakesTurns(Net):
    """A block with BatchNorm computes twice."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.layer = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Any:
        first = self.blocks[0]
        return first(super().forward(x))


def step(model: nn.Module, knobs: str) -> Tensor:
    inputs = torch.randn(3, WIDTH)
    task = lowvram.task(model, inputs, lambda outputs, targets: (outputs.sum(-1) - targets).square().sum())
    return lowvram.step(lowvram.assemble(task, knobs, "cpu"), lowvram.Part(inputs, torch.randn(3)))[0]


@pytest.mark.parametrize(
    ("model", "knobs", "sentence"),
    [
        (InSingle, "precision=bf16_pure", "computes with weights in bf16: choose precision=bf16, or fp32"),
        (Positions, "precision=bf16_pure", "computes with weights in bf16: choose precision=bf16, or fp32"),
        (Forces, "tile=blocks tile.samples=2", "gradients aren't differentiated again"),
        (
            TakesTurns,
            "compile=blocks compile.backend=aot_eager ckpt=every1",
            "isn't written again before its backward pass: compute each block once",
        ),
        (Forces, "adapter=qlora", "gradients aren't differentiated again"),
    ],
)
def test_a_misfit_is_a_refusal(model: type[nn.Module], knobs: str, sentence: str) -> None:
    with pytest.raises(Incompatible, match=f"^{knobs.split()[0]} needs that .*{sentence}.* \\(torch: [^\n]+\\)$"):
        step(model(), knobs)


@pytest.mark.parametrize("device", ["cpu", "rtx3060"])
def test_a_plan_refuses_norms_that_a_step_refuses(device: str) -> None:
    inputs, targets = torch.randn(3, WIDTH), torch.randn(3)
    task = lowvram.task(Positions(), inputs, lambda outputs, y: (outputs.sum(-1) - y).square().sum())
    with pytest.raises(Incompatible, match="computes with weights in bf16: choose precision=bf16, or fp32"):
        lowvram.plan(task, targets, 3, "precision=bf16_pure", device=device)
    assert lowvram.plan(task, targets, 3, "precision=bf16", device=device)["allocated_bytes"] > 0


def counting() -> Callable[[], int]:
    """A function that returns how often it was called: nobody sees that it holds something."""
    calls = count()
    return lambda: next(calls)


class LateLoss(Block):
    """Saves more in the sixth step than in its repetition."""

    def __init__(self) -> None:
        super().__init__()
        self.count = counting()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh().exp() if self.count() == 10 else super().forward(x)


def steps(rig: lowvram.Rig, part: lowvram.Part, number: int) -> None:
    for _ in range(number):
        lowvram.step(rig, part)


def test_a_block_that_later_computes_something_else_again_is_a_misfit() -> None:
    for knobs in ("ckpt=every1", "ckpt=auto", "ckpt=sqrt ckpt.segment=1", "ckpt=selective"):
        inputs, targets = torch.randn(3, WIDTH), torch.randn(3)
        task = lowvram.task(of_blocks(LateLoss), inputs, lambda outputs, y: (outputs.sum(-1) - y).square().sum())
        rig = lowvram.assemble(task, knobs, "cpu")
        with pytest.raises(Incompatible, match=f"^{knobs.split()[0]} needs that blocks compute the same .*ckpt=none"):
            steps(rig, lowvram.Part(inputs, targets), 8)


class View(Block):
    """Has a view of another size, the user's bug."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1, WIDTH + 1)


class Strided(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x.as_strided((9, 9), (9, 9))


class Chunked(Block):
    """Changes one of several views in place, which autograd allows nowhere."""

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.layer(x).chunk(2, -1)
        return x + torch.cat([one.add_(1), other], -1)


class InDouble(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x.double() @ self.layer.weight


class Indexed(Block):
    """Looks numbers up that are no whole ones."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.embedding(x, self.layer.weight)


class Strict(Block):
    """Refuses its inputs in words of its own."""

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("Half of the batch is empty, which BFloat16 needn't be; setStorage: for storage of size 0")


def of_blocks(block: type[nn.Module]) -> Net:
    net = Net()
    net.blocks = nn.ModuleList([block(), block()])
    return net


@pytest.mark.parametrize("block", [View, Strided, Chunked, InDouble, Indexed, Strict])
def test_a_bug_of_the_models_own_is_not_the_knobs(block: type[nn.Module]) -> None:
    """It fails without the knob as well."""
    for knobs in ("", "offload=parameters", "precision=bf16", "precision=fp16", "precision=bf16_pure"):
        with pytest.raises(RuntimeError):
            step(of_blocks(block), knobs)


def test_a_format_counts_where_it_meets_fp32_or_an_operator_lacks_it() -> None:
    of_knob = (
        "\"cdist\" not implemented for 'BFloat16'",
        "expected m1 and m2 to have the same dtype, but got: float != c10::BFloat16",
        "mat1 and mat2 must have the same dtype, but got BFloat16 and Float",
        "Input type (CPUBFloat16Type) and weight type (torch.FloatTensor) should be the same",
        "Expected both inputs to be Half, Float or Double tensors but got BFloat16 and BFloat16",
        "view_as_complex is only supported for half, float and double tensors, but got ... scalar type: BFloat16",
        "Unsupported dtype BFloat16",
        "value cannot be converted to type at::BFloat16 without overflow",
    )
    of_model = (
        "expected m1 and m2 to have the same dtype, but got: double != c10::BFloat16",
        "expected m1 and m2 to have the same dtype, but got: c10::BFloat16 != long long",
        "expected m1 and m2 to have the same dtype, but got: c10::complex<float> != c10::BFloat16",
        "expected one of the following scalar types: Long, Int; but got CPUBFloat16Type instead",
        "mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)",
    )
    assert [words for words in of_knob if not re.search(of_format("BFloat16"), words)] == []
    assert [words for words in of_model if re.search(of_format("BFloat16"), words)] == []
    for words in (
        "Unsupported dtype ComplexHalf",
        "expected scalar type Half but found Float",
        "got: c10::Half != float",
    ):
        assert re.search(of_format("Half"), words)


@pytest.mark.parametrize(
    "words",
    ["CUDA out of memory. Tried to allocate 2.00 GiB", "index out of range in self", "CUDA error: device-side assert"],
)
def test_what_torchscript_repeats_of_memory_and_values_is_not_the_knobs(words: str) -> None:
    start = "The following operation failed in the TorchScript interpreter.\nTraceback of TorchScript:\n"
    run = raising_as_c(RuntimeError(start + words))
    knobs = {"compile=torchscript": TorchScript()}
    with pytest.raises(RuntimeError, match=words) as failed:
        with_reasons(run, knobs)(cast("Any", None), [], torch.ones(()))
    assert is_out_of_memory(failed.value) is ("memory" in words)
    with pytest.raises(Incompatible, match="TorchScript can run the model's blocks"):
        with_reasons(raising_as_c(RuntimeError(start + "no such operator")), knobs)(
            cast("Any", None), [], torch.ones(())
        )


def test_other_errors_stay_what_they_are() -> None:
    class Broken(Net):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x) @ x

    for knobs in ("", "precision=bf16"):
        with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied"):
            step(Broken(), knobs)
    assert step(Forces(), "ckpt=every1").isfinite()
