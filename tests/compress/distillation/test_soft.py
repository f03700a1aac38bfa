"""Soft targets: their divergence and its gradient, live and from a cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lowvram.compress.distillation.soft import (
    IDS,
    REST,
    VALUES,
    CachedSoftTargets,
    Likeliest,
    LiveSoftTargets,
    SoftLoss,
)
from lowvram.core.soft_targets import ROWS, SoftTargets

N, V, T = ROWS + 5, 7, 3.0  # more rows than are computed at a time


def logits(seed: int, num_rows: int = N) -> Tensor:
    return 2 * torch.randn(num_rows, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def live(of_teacher: Tensor) -> LiveSoftTargets:
    return LiveSoftTargets(0.7, T, of_teacher, None)


def cached(of_teacher: Tensor, top: int, values: torch.dtype = torch.float64) -> CachedSoftTargets:
    log_q, ids, rest = Likeliest.of(torch.log_softmax(of_teacher / T, -1), top)
    return CachedSoftTargets(0.7, T, {VALUES: log_q.to(values), IDS: ids.int(), REST: rest})


def kinds(num_rows: int = N) -> list[SoftTargets]:
    return [live(logits(1, num_rows)), *(cached(logits(1, num_rows), top) for top in (1, 4, V))]


def test_the_divergence_is_that_of_torch() -> None:
    student, teacher = logits(0), logits(1)
    p, q = (torch.log_softmax(each / T, -1) for each in (student, teacher))
    wanted = nn.functional.kl_div(p, q, reduction="none", log_target=True).sum(-1) * 0.7 * T**2
    losses, _ = live(teacher).loss(slice(0, N), student)
    torch.testing.assert_close(losses, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("soft", kinds(3), ids=["live", "top1", "top4", "all"])
def test_gradients_are_those_of_finite_differences(soft: SoftTargets) -> None:
    counts = torch.tensor([True, False, True])
    student = logits(0, 3).requires_grad_()
    torch.autograd.gradcheck(lambda each: SoftLoss.apply(each, counts, soft), (student,))


@pytest.mark.parametrize("soft", kinds(), ids=["live", "top1", "top4", "all"])
def test_rows_that_do_not_count_add_nothing(soft: SoftTargets) -> None:
    counts = torch.arange(N) % 3 > 0
    student = logits(0).requires_grad_()
    loss = SoftLoss.apply(student, counts, soft)
    (gradient,) = torch.autograd.grad(loss, student)  # pyright: ignore[reportArgumentType, reportCallIssue]
    losses, _ = soft.loss(slice(0, N), student.detach())
    torch.testing.assert_close(loss.detach(), losses[counts].sum())  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    assert not gradient[~counts].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_cache_of_all_classes_is_the_teacher(dtype: torch.dtype) -> None:
    student, teacher = logits(0), logits(1)
    wanted, wanted_gradient = live(teacher).loss(slice(0, N), student)
    losses, gradient = cached(teacher, V, dtype).loss(slice(0, N), student)
    bound = 1e-12 if dtype is torch.float64 else 1e-6
    torch.testing.assert_close(losses, wanted, rtol=bound, atol=bound)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=bound, atol=bound)


@pytest.mark.parametrize("top", [1, 4, V])
def test_what_a_cache_leaves_out_is_one_event(top: int) -> None:
    """A student that agrees on the likeliest classes and on the sum of the others has nothing to learn."""
    teacher = logits(1)
    q = torch.softmax(teacher / T, -1)
    ids = q.topk(top, -1).indices
    others = torch.ones_like(q).scatter(-1, ids, 0)
    evened = q * (1 - others) + others * (q * others).sum(-1, keepdim=True) / others.sum(-1, keepdim=True).clamp(min=1)
    losses, gradient = cached(teacher, top).loss(slice(0, N), evened.log() * T)
    assert losses.abs().max() < 1e-12
    assert gradient.abs().max() < 1e-12


def test_fewer_classes_tell_less() -> None:
    """Joining events never increases a divergence."""
    losses = [cached(logits(1), top).loss(slice(0, N), logits(0))[0].sum() for top in range(1, V + 1)]
    assert losses == sorted(losses)


def test_the_gradient_of_16_bit_logits_is_not_lost() -> None:
    """In fp16 the gradients of many targets are too small before a loss scale multiplies them."""
    student = (logits(0) * 1e-3).half().requires_grad_()
    loss = SoftLoss.apply(student, torch.ones(N, dtype=torch.bool), live(logits(0) * 1e-3))
    (gradient,) = torch.autograd.grad(loss * 2.0**15, student)  # pyright: ignore[reportArgumentType, reportCallIssue, reportOptionalOperand]
    _, wanted = live(logits(0) * 1e-3).loss(slice(0, N), student.detach())
    assert gradient.dtype is torch.float16
    torch.testing.assert_close(gradient.float(), wanted * 2.0**15, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("top", [1, 4, V])
def test_rounded_probabilities_are_made_to_sum_to_one(top: int) -> None:
    """Else the gradient of a row wouldn't sum to 0, and would move all logits."""
    _, gradient = cached(logits(1), top, torch.float16).loss(slice(0, N), logits(0))
    assert gradient.sum(-1).abs().max() < 1e-12


@pytest.mark.parametrize("values", [torch.float64, torch.float16])
def test_classes_that_the_teacher_rules_out_add_nothing(values: torch.dtype) -> None:
    """Their logarithms are -inf: as logits of the teacher, or once they are rounded to fp16."""
    student, teacher = logits(0), logits(1)
    teacher[:, 2] = -torch.inf
    teacher[:, 3] = -1e7
    for soft in (live(teacher), cached(teacher, V, values), cached(teacher, 4, values)):
        losses, gradient = soft.loss(slice(0, N), student)
        assert losses.isfinite().all()
        assert gradient.isfinite().all()
