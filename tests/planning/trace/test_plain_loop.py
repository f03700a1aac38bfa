"""Plans of loops that hold more than lowvram's, beside such a loop, written by hand."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowvram
from lowvram.config.errors import BadInput
from lowvram.config.settings import ZERO_GRADS
from lowvram.core.ledger import ledger
from lowvram.core.row_shape import RowShape
from lowvram.planning.trace.plain_loop import check_is_plain
from tests.laboratory import CPU, needs_gpu

KNOBS = "optimizer=external optimizer.target=torch.optim.{}"
CUDA = torch.device("cuda")


def wide() -> nn.Module:
    """Large weights, few activations: gradients that are kept add to the peak."""
    return nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 512))


def deep() -> nn.Module:
    """Small weights, many activations, large outputs."""
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.GELU())), nn.Linear(64, 8000))


MODELS: dict[str, tuple[Callable[[], nn.Module], int, int, int]] = {
    "wide": (wide, 1024, 512, 512),
    "deep": (deep, 256, 64, 8000),
}


def samples(name: str) -> tuple[Tensor, Tensor]:
    _, number, width, num_classes = MODELS[name]
    return torch.randn(number, width), torch.randint(num_classes, (number,))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, name: str, device: torch.device, zero_grad: str = ""
) -> None:
    """Four steps of a plain loop."""
    for _ in range(4):
        inputs, targets = (each.to(device, copy=True) for each in samples(name))
        if zero_grad == "before_forward":
            optimizer.zero_grad()
        outputs = model(inputs)
        loss = F.cross_entropy(outputs, targets)
        if zero_grad in ("", "before_backward"):
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if zero_grad == "after_step":
            optimizer.zero_grad()


def planned(name: str, optimizer: str, device: str, loop: str, zero_grad: str | None = None) -> int:
    """The allocated bytes, without workspaces that stay in a process."""
    inputs, targets = samples(name)
    task = lowvram.task(MODELS[name][0](), inputs[:2])
    plan = lowvram.plan(
        task, targets[:2], len(inputs), KNOBS.format(optimizer), device=device, loop=loop, zero_grad=zero_grad
    )
    workspaces = (line["bytes"] for line in plan["lines"] if line["name"].startswith("cuBLAS workspace of"))
    return plan["allocated_bytes"] - sum(workspaces)


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize("name", MODELS)
def test_a_plain_loop_takes_what_is_planned(name: str, optimizer: str) -> None:
    model = MODELS[name][0]()
    rule = getattr(torch.optim, optimizer)(model.parameters(), foreach=False)
    with ledger(model, rule) as peak:
        train(model, rule, name, CPU)
    assert planned(name, optimizer, "cpu", "plain") == pytest.approx(peak.peak_bytes, rel=0.01)
    assert planned(name, optimizer, "cpu", "lowvram") < 0.95 * peak.peak_bytes


@pytest.mark.parametrize("zero_grad", ZERO_GRADS)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_live_until_the_loop_zeroes_them(name: str, zero_grad: str) -> None:
    model = MODELS[name][0]()
    rule = torch.optim.SGD(model.parameters(), foreach=False)
    with ledger(model, rule) as peak:
        train(model, rule, name, CPU, zero_grad)
    assert planned(name, "SGD", "cpu", "plain", zero_grad) == pytest.approx(peak.peak_bytes, rel=0.01)


def test_where_gradients_are_zeroed_matters() -> None:
    many = [planned("wide", "SGD", "cpu", "plain", zero_grad) for zero_grad in ZERO_GRADS]
    assert many[0] > many[1] >= many[2]


@needs_gpu[0]
@needs_gpu[1]
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize("name", MODELS)
def test_a_plain_loop_on_a_card_takes_what_is_planned(name: str, optimizer: str) -> None:
    (torch.ones(64, 64, device=CUDA, requires_grad=True) @ torch.ones(64, 64, device=CUDA)).sum().backward()
    gc.collect()
    before = torch.cuda.memory_allocated()
    model = MODELS[name][0]().to(CUDA)
    torch.cuda.reset_peak_memory_stats()
    train(model, getattr(torch.optim, optimizer)(model.parameters()), name, CUDA)
    taken = torch.cuda.max_memory_allocated() - before
    assert planned(name, optimizer, "h100", "plain") == pytest.approx(taken, rel=0.01)


def test_what_has_no_such_loop_is_refused() -> None:
    inputs, targets = samples("wide")
    task = lowvram.task(wide(), inputs[:2])
    with pytest.raises(BadInput, match=r"plan\.loop='plain': must be lowvram with stepping=in_backward: a plain loop"):
        lowvram.plan(task, targets[:2], 8, "stepping=in_backward", loop="plain")
    with pytest.raises(BadInput, match="loop='theirs': must be one of lowvram, plain"):
        lowvram.plan(task, targets[:2], 8, loop="theirs")
    with pytest.raises(BadInput, match="zero_grad='later': must be null or one of before_backward, before_forward"):
        lowvram.plan(task, targets[:2], 8, loop="plain", zero_grad="later")
    with pytest.raises(BadInput, match="zero_grad='after_step': must be null unless the loop is plain"):
        lowvram.plan(task, targets[:2], 8, zero_grad="after_step")
    with pytest.raises(BadInput, match=r"plan\.loop='plain': must be lowvram with a pipeline"):
        check_is_plain({}, RowShape(pipeline=2))
