"""Cross-entropy with a weight in host memory: the numbers are those of whole logits, for tiles of any size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lowvram.core import host
from lowvram.core.rig import IGNORE
from lowvram.knobs.logits.tile import StreamedCrossEntropy, Way
from tests.laboratory import relative_error

NUM_TARGETS, WIDTH, NUM_CLASSES = 250, 16, 211


def make_inputs(dtype: torch.dtype, bias: bool) -> list[Tensor | None]:
    draw = torch.Generator().manual_seed(0)
    shapes = [(NUM_TARGETS, WIDTH), (NUM_CLASSES, WIDTH), (NUM_CLASSES,)]
    hidden, weight, of_bias = (torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes)
    host.mark(weight)
    return [each.requires_grad_() for each in (hidden, weight)] + [of_bias.requires_grad_() if bias else None]


def make_targets() -> Tensor:
    targets = torch.randint(NUM_CLASSES, (NUM_TARGETS,), generator=torch.Generator().manual_seed(1))
    targets[::5] = IGNORE
    return targets


def numbers(loss: Tensor, inputs: list[Tensor | None]) -> dict[str, Tensor]:
    (loss / 7).backward()
    return {"loss": loss.detach()} | {
        str(index): each.grad for index, each in enumerate(inputs) if each is not None and each.grad is not None
    }


def way(dtype: torch.dtype, chunk_tokens: int = 60) -> Way:
    return Way(chunk_tokens, dtype, True, False, None, lambda: None, None)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk_tokens", [1, 60, 250, 1000])
@pytest.mark.parametrize(("dtype", "band"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.float16, 4e-3)])
def test_the_numbers_are_those_of_whole_logits(dtype: torch.dtype, band: float, chunk_tokens: int, bias: bool) -> None:
    inputs, wanted_inputs = make_inputs(dtype, bias), make_inputs(dtype, bias)
    found = StreamedCrossEntropy.apply(*inputs, make_targets(), way(dtype, chunk_tokens))
    whole = [None if each is None else each.to(torch.promote_types(dtype, torch.float32)) for each in wanted_inputs]
    logits = nn.functional.linear(*whole)  # pyright: ignore[reportArgumentType]
    wanted = nn.functional.cross_entropy(logits, make_targets(), reduction="sum")
    assert isinstance(found, Tensor)
    assert relative_error(numbers(found, inputs), numbers(wanted, wanted_inputs)) <= band
    weight = inputs[1]
    assert weight is not None
    assert weight.grad is not None
    assert host.holds(weight.grad)


def test_what_needs_no_gradient_gets_none() -> None:
    hidden, weight, _ = make_inputs(torch.float32, bias=False)
    assert hidden is not None
    assert weight is not None
    loss = StreamedCrossEntropy.apply(hidden, weight.detach_(), None, make_targets(), way(torch.float32))
    assert isinstance(loss, Tensor)
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_a_part_without_samples_has_no_loss() -> None:
    _, weight, _ = make_inputs(torch.float32, bias=False)
    nobody = torch.empty(0, WIDTH, requires_grad=True)
    loss = StreamedCrossEntropy.apply(nobody, weight, None, make_targets()[:0], way(torch.float32))
    assert isinstance(loss, Tensor)
    loss.backward()
    assert loss == 0
    assert weight is not None
    assert weight.grad is not None
    assert not weight.grad.any()
