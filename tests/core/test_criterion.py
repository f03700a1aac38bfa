"""A user's criterion: a sum is used as it is, a mean is refused by the first call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowvram.config.errors import BadInput
from lowvram.core.criterion import UserCriterion
from lowvram.core.rig import IGNORE
from lowvram.planning.trace.fake import fake_tensors

LOGITS, CLASSES = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 2, 3, IGNORE, 4])


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="sum", ignore_index=IGNORE)


def of_a_dictionary(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs["logits"], targets)


@dataclass(frozen=True)
class OfDataclass:
    logits: Tensor
    rest: None = None


def of_an_object(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.logits, targets)


def wrapped(criterion: Callable[[Any, Any], Any]) -> UserCriterion:
    return UserCriterion(criterion, "criterion", getattr(criterion, "__name__", criterion))


def test_a_sum_is_what_it_was() -> None:
    criterion = wrapped(summed)
    for _ in range(2):
        assert criterion(LOGITS, CLASSES).item() == summed(LOGITS, CLASSES).item()


@pytest.mark.parametrize(
    ("criterion", "outputs"),
    [
        (lambda outputs, targets: F.cross_entropy(outputs.roll(1, 0), targets.roll(1, 0)), LOGITS),
        (lambda outputs, targets: F.cross_entropy(outputs, targets, label_smoothing=0.1), LOGITS),
        (of_a_dictionary, {"logits": LOGITS, "scale": 2.0}),
        (of_an_object, SimpleNamespace(logits=LOGITS, hidden=[LOGITS], scale=2.0)),
        (of_an_object, OfDataclass(LOGITS)),
    ],
)
def test_a_mean_is_refused(criterion: Callable[[Any, Tensor], Any], outputs: Any) -> None:
    sentence = r"returns the sum of the losses, not their mean: for one sample it was [\d.]+, .* take reduction='sum'"
    with pytest.raises(BadInput, match=rf"^criterion=.*: must be .* {sentence}"):
        wrapped(criterion)(outputs, CLASSES)


def test_outputs_that_can_not_be_taken_apart_are_used_as_they_are() -> None:
    class Closed:
        __slots__ = ("logits",)

    closed = Closed()
    closed.logits = LOGITS
    total = wrapped(lambda outputs, targets: summed(outputs.logits, targets))(closed, CLASSES)
    assert total.item() == summed(LOGITS, CLASSES).item()


def test_only_the_first_call_is_checked() -> None:
    num_samples: list[int] = []

    def noting(outputs: Tensor, targets: Tensor) -> Tensor:
        num_samples.append(len(targets))
        return summed(outputs, targets)

    criterion = wrapped(noting)
    for _ in range(3):
        criterion(LOGITS, CLASSES)
    assert num_samples == [1, 2, 5, 5, 5]


@pytest.mark.parametrize("targets", [torch.full((5,), IGNORE), CLASSES])
def test_a_loss_of_nothing_is_no_mean(targets: Tensor) -> None:
    assert wrapped(lambda outputs, targets: 0.0 * summed(outputs, targets))(LOGITS, targets).item() == 0


def test_outputs_that_do_not_count_samples_are_left_alone() -> None:
    criterion = wrapped(lambda outputs, targets: outputs[1] * F.cross_entropy(outputs[0], targets))
    assert criterion((LOGITS, torch.tensor(5.0)), CLASSES).item() > 0


def test_a_plan_checks_nothing() -> None:
    with fake_tensors():
        wrapped(of_a_dictionary)({"logits": torch.zeros(5, 7)}, torch.zeros(5, dtype=torch.long))


def test_a_mean_is_refused_if_the_first_sample_has_no_target() -> None:
    with pytest.raises(BadInput, match="not their mean"):
        wrapped(of_a_dictionary)({"logits": LOGITS.roll(2, 0)}, CLASSES.roll(2, 0))


def test_targets_may_be_several_tensors() -> None:
    targets = {"kind": CLASSES, "sizes": (torch.rand(5, 2), torch.rand(5))}

    def loss(outputs: Tensor, targets: Any) -> Tensor:
        sizes = targets["sizes"]
        return summed(outputs, targets["kind"]) + sizes[0].sum() + sizes[1].sum()

    assert wrapped(loss)(LOGITS, targets).item() == loss(LOGITS, targets).item()
    with pytest.raises(BadInput, match="not their mean"):
        wrapped(lambda outputs, targets: loss(outputs, targets) / len(outputs))(LOGITS, targets)
