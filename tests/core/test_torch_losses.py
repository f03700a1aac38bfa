"""torch's losses, which return means: split into parts, they train as on the whole batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import lowvram
from lowvram.config.errors import BadInput, BadSample
from lowvram.core.criterion import UserCriterion

GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(6, 4, generator=GENERATOR)
CLASSES = torch.tensor([1, 2, -100, -100, 0, 1])
PIXELS = torch.randint(3, (6, 5), generator=GENERATOR)
SHARES = torch.rand(6, 3, generator=GENERATOR)
WEIGHTS = torch.tensor([0.5, 1.0, 4.0])


class Pixels(nn.Module):
    """(b, 4) -> (b, 3, 5), as torch's class losses expect the classes of several places."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 15)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs).view(-1, 3, 5)


@dataclass
class SumOfSquares:
    reduction: str = "sum"

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs, targets, reduction=self.reduction)


def made(module: type[nn.Module], *args: int) -> nn.Module:
    torch.manual_seed(0)
    return module(*args)


@pytest.mark.parametrize("accum", ["accum=none", "accum=x2", "accum=x2 accum.parts=3"])
@pytest.mark.parametrize(
    ("model", "criterion", "targets"),
    [
        (lambda: made(nn.Linear, 4, 3), nn.CrossEntropyLoss(), CLASSES),
        (lambda: made(nn.Linear, 4, 3), F.cross_entropy, CLASSES),
        (lambda: made(nn.Linear, 4, 3), nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.1), CLASSES),
        (lambda: made(nn.Linear, 4, 3), nn.CrossEntropyLoss(ignore_index=1), CLASSES.clamp(min=0)),
        (lambda: made(nn.Linear, 4, 3), nn.CrossEntropyLoss(), SHARES.softmax(1)),
        (lambda: made(Pixels), nn.CrossEntropyLoss(), PIXELS),
        (lambda: made(Pixels), nn.NLLLoss(WEIGHTS), PIXELS),
        (lambda: made(nn.Linear, 4, 3), nn.MSELoss(), SHARES),
        (lambda: made(nn.Linear, 4, 3), F.smooth_l1_loss, SHARES),
        (lambda: made(nn.Linear, 4, 3), nn.BCEWithLogitsLoss(pos_weight=WEIGHTS), SHARES),
    ],
)
def test_parts_give_the_mean_over_the_whole_batch(model: Any, criterion: Any, targets: Tensor, accum: str) -> None:
    plain = model()
    wanted = criterion(plain(INPUTS), targets)
    wanted.backward()
    module = model()
    rig = lowvram.assemble(lowvram.task(module, INPUTS, criterion), [accum, "optimizer=sgd"], "cpu")
    loss, update = lowvram.step(rig, lowvram.Part(INPUTS, targets))
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    norm = torch.cat([parameter.grad.flatten() for parameter in plain.parameters()]).norm()
    assert update.grad_norm.item() == pytest.approx(norm.item(), rel=1e-5)


def test_a_sum_of_torch_counts_what_it_sums() -> None:
    criterion = nn.CrossEntropyLoss(ignore_index=1, reduction="sum")
    rig = lowvram.assemble(lowvram.task(made(nn.Linear, 4, 3), INPUTS, criterion), [], "cpu")
    loss, _ = lowvram.step(rig, lowvram.Part(INPUTS, CLASSES.clamp(min=0)))
    plain = nn.CrossEntropyLoss(ignore_index=1)(made(nn.Linear, 4, 3)(INPUTS), CLASSES.clamp(min=0))
    assert loss.item() == pytest.approx(plain.item(), rel=1e-6)


def test_a_criterion_may_be_an_object_without_a_hash() -> None:
    rig = lowvram.assemble(lowvram.task(made(nn.Linear, 4, 3), INPUTS, SumOfSquares()), [], "cpu")
    loss, _ = lowvram.step(rig, lowvram.Part(INPUTS, SHARES))
    assert loss.item() == pytest.approx(nn.MSELoss()(made(nn.Linear, 4, 3)(INPUTS), SHARES).item(), rel=1e-6)


def test_the_losss_own_reduction_stays() -> None:
    criterion = nn.MSELoss()
    lowvram.task(nn.Linear(4, 3), INPUTS, criterion)
    assert criterion.reduction == "mean"


def test_elements_that_would_be_broadcast_are_refused() -> None:
    rig = lowvram.assemble(lowvram.task(made(nn.Linear, 4, 1), INPUTS, nn.MSELoss()), [], "cpu")
    with pytest.raises(BadInput, match=r"outputs and targets differ in shape as here: \[\(6, 1\), \(6,\)\]"):
        lowvram.step(rig, lowvram.Part(INPUTS, torch.rand(6)))


def test_a_plan_of_weighted_classes() -> None:
    task = lowvram.task(made(nn.Linear, 4, 3), INPUTS, nn.CrossEntropyLoss(WEIGHTS))
    for device in ("cpu", "rtx3060"):
        assert lowvram.plan(task, CLASSES, batch_size=4, device=device)["allocated_bytes"] > 0


def test_outputs_and_labels_that_a_class_loss_cannot_take_are_one_sentence() -> None:
    def called(outputs: Tensor, targets: Tensor, loss: Any = None) -> None:
        UserCriterion(loss or nn.CrossEntropyLoss(), "task.target", "the loss")(outputs, targets)

    called(torch.zeros(4, 3), torch.tensor([0, 2, -100, 1]))
    called(torch.zeros(4, 3, 5), torch.zeros(4, 5, dtype=torch.long))
    called(torch.zeros(4, 3, 5), torch.zeros(4, 3, 5))
    with pytest.raises(
        BadInput, match=r"outputs \(2, 8, 16\) and targets \(2, 8\), whose classes stand last, .*task=auto"
    ):
        called(torch.zeros(2, 8, 16), torch.zeros(2, 8, dtype=torch.long))
    with pytest.raises(BadInput, match=r"outputs \(2, 16\) and targets \(2, 8\): torch's wants a target for each row"):
        called(torch.zeros(2, 16), torch.zeros(2, 8, dtype=torch.long))
    for label, ignored in ((3, -100), (255, -100), (-1, -100), (-100, 255)):
        loss = nn.CrossEntropyLoss(ignore_index=ignored)
        with pytest.raises(
            BadSample, match=rf"sample 1 of the first batch has the label {label}: .* 3 classes, .*{ignored} is"
        ):
            called(torch.zeros(2, 3, 4), torch.tensor([[0, 1, 2, 0], [0, 1, 2, label]]), loss)
    criterion = UserCriterion(nn.CrossEntropyLoss(), "task.target", "the loss")
    criterion(torch.zeros(2, 3), torch.tensor([0, 1]))
    with pytest.raises(
        BadSample, match=r"^in a sample, Target 3 is out of bounds: the model has outputs for 3 classes"
    ):
        criterion(torch.zeros(2, 3), torch.tensor([0, 3]))


def test_a_plan_refuses_what_the_loss_cannot_take() -> None:
    with FakeTensorMode():
        outputs, targets = torch.zeros(2, 8, 16), torch.zeros(2, 8, dtype=torch.long)
        with pytest.raises(BadInput, match="whose classes stand last"):
            UserCriterion(nn.CrossEntropyLoss(), "task.target", "the loss")(outputs, targets)
        with pytest.raises(BadInput, match="outputs and targets differ in shape"):
            UserCriterion(nn.MSELoss(), "task.target", "the loss")(outputs, targets.float())
