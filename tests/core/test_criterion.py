"""A user's criterion: a sum is used as it is, a mean is refused by the first call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowvram.config.errors import BadInput
from lowvram.core.criterion import UserCriterion
from lowvram.core.rig import IGNORE, Part
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


# What is the same for all samples, and what isn't known


def mean_and_more(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs[0], targets) + 0.01 * outputs[1].sum()


@pytest.mark.parametrize("more", [torch.tensor(0.3), torch.rand(3, 5), torch.rand(2)])
def test_a_mean_is_refused_beside_outputs_without_a_row_for_each_sample(more: Tensor) -> None:
    with pytest.raises(BadInput, match="not their mean"):
        wrapped(mean_and_more)((LOGITS, more), CLASSES)


LINES: list[tuple[Callable[[Any, Tensor], Any], str | None]] = [
    (lambda outputs, targets: outputs[1] * 1.0, "depends on tensor 2 of the model's outputs"),
    (lambda outputs, targets: summed(outputs[0], targets) + outputs[1], "depends on tensor 2 of the model's outputs"),
    (lambda outputs, targets: summed(outputs[0], targets) + len(targets) * outputs[1], None),
    (lambda outputs, targets: summed(outputs[0], targets), None),
    (lambda outputs, targets: summed(outputs[0], targets) / (len(targets) > 2), "can't be computed of two samples"),
    (lambda outputs, targets: 9 * outputs[0].var(0).sum() + F.cross_entropy(outputs[0], targets), "a sum would be"),
]


@pytest.mark.parametrize(("criterion", "says"), LINES, ids=range(len(LINES)))
def test_a_line_tells_what_is_not_known(
    criterion: Callable[[Any, Tensor], Any], says: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = (LOGITS, torch.tensor(0.3, requires_grad=True))
    wanted, found = criterion(outputs, CLASSES), wrapped(criterion)(outputs, CLASSES)
    assert torch.equal(found, wanted)
    told = capsys.readouterr().out
    assert told.count("\n") == (says is not None)
    assert (says or "") in told


def in_batch(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)), reduction="sum")


@pytest.mark.parametrize("num_samples", [1, 5])
@pytest.mark.parametrize(("criterion", "is_told"), [(summed, False), (in_batch, True)])
def test_parts_of_a_batch_are_told_to_change_a_loss_that_is_no_sum(
    criterion: Callable[[Any, Any], Any], num_samples: int, is_told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    user = wrapped(criterion)
    for num_parts in (1, 3, 3):
        user.num_parts = num_parts
        user(LOGITS[:num_samples], CLASSES[:num_samples])
    assert capsys.readouterr().out.count("isn't the sum of theirs") == is_told


# Criteria with values of their own


class Weighted(nn.Module):
    def __init__(self, trains: bool = True) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(7), requires_grad=trains)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return summed(outputs * self.scale, targets)


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(7))
        self.num_calls = 0

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.num_calls += 1
        self.centre = 0.9 * self.centre + 0.1 * outputs.mean(0)
        self.noise = torch.rand(1)
        return summed(outputs - self.centre, targets)


class CentredObject:
    def __init__(self) -> None:
        self.centre, self.num_calls = torch.zeros(7), 0

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.num_calls += 1
        self.centre.mul_(0.9).add_(outputs.mean(0), alpha=0.1)
        return summed(outputs - self.centre + 0 * torch.rand(1), targets)


def calling(criterion: Any) -> Callable[[Any, Any], Any]:
    return lambda outputs, targets: criterion(outputs, targets)


@pytest.mark.parametrize(
    "wrap", [lambda criterion: criterion, calling, lambda criterion: criterion.forward], ids=range(3)
)
def test_weights_of_a_criterion_are_refused(wrap: Callable[[Any], Any]) -> None:
    with pytest.raises(BadInput, match="without weights of its own: scale would get gradients, and never train"):
        wrapped(wrap(Weighted()))(LOGITS, CLASSES)
    assert wrapped(wrap(Weighted(trains=False)))(LOGITS, CLASSES) > 0


def test_weights_of_the_model_may_be_in_the_criterion() -> None:
    model = nn.Linear(2, 2)
    user = wrapped(lambda outputs, targets: summed(outputs, targets) + model.weight.square().sum() * len(targets))
    user.models = lambda: (model,)
    assert user(LOGITS, CLASSES).requires_grad


@pytest.mark.parametrize("wrap", [lambda each: each, calling], ids=range(2))
@pytest.mark.parametrize("make", [Centred, CentredObject])
def test_the_trial_leaves_no_trace(make: Callable[[], Any], wrap: Callable[[Any], Any]) -> None:
    tried, plain = make(), make()
    results = []
    for each, is_tried in ((tried, True), (plain, False)):
        criterion = wrap(getattr(each, "criterion", each))
        torch.manual_seed(3)
        user = wrapped(criterion) if is_tried else criterion
        if isinstance(user, UserCriterion):
            user.num_parts = 2
        results.append((user(LOGITS, CLASSES), torch.rand(2), each.centre))
    assert tried.num_calls == plain.num_calls == 1
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


# Targets that are floats


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs, targets, reduction="sum")


def masked(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets).square() * (targets != IGNORE)).sum()


def test_a_float_of_minus_100_counts_where_the_loss_counts_it() -> None:
    outputs, levels = torch.zeros(3, 2), torch.tensor([[1.0, IGNORE], [2.0, 3.0], [IGNORE, IGNORE]])
    leaving_out = wrapped(masked)
    leaving_out(outputs, levels)
    assert leaving_out.num_targets(Part(None, levels)).item() == 3
    with pytest.raises(BadInput, match=r"leaves out targets of -100, .* or that has count\(targets\)"):
        wrapped(squares)(outputs, levels)
    counting = UserCriterion(squares, "criterion", "squares", count=Tensor.numel)
    counting(outputs, levels)
    assert counting.num_targets(Part(None, levels)).item() == 6
    later = wrapped(squares)
    later(outputs, levels.clamp(min=0))
    assert later.num_targets(Part(None, levels)).item() == 6
