"""The mean loss and the scores on the held-out samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.backends import mha

from lowvram.core.generators import same_draws_afterwards
from lowvram.core.loss_parts import unchanged_afterwards
from lowvram.core.mesh import data_ranks, ranks_with_outputs
from lowvram.core.rig import IGNORE, Part, Rig
from lowvram.core.stages import StageEnds
from lowvram.data.loader import eval_batches
from lowvram.loops.session import NonFinite, Session
from lowvram.loops.user_metrics import Metric, user_metrics
from lowvram.tasks import Problem


@dataclass(frozen=True)
class Evaluation:
    """Mean loss per target (nats) and the task's scores."""

    loss: float
    scores: dict[str, float]

    def metrics(self) -> dict[str, float]:
        """By the names that metrics.jsonl and loggers use."""
        return {"loss/eval": self.loss} | {f"eval/{name}": value for name, value in self.scores.items()}


def evaluate(session: Session) -> Evaluation:
    """One pass over the held-out samples, in parts no larger than those of training. Each rank evaluates a share of
    them. A collective: all ranks must call it.

    Raises:
        NonFinite: all targets of the held-out samples are `IGNORE`.
    """
    rig, settings = session.rig, session.settings
    metrics = user_metrics(settings.eval.metrics or (), rig.device)
    part_size = math.ceil(settings.train.batch_size / (data_ranks().size * settings.num_parts))
    parts = eval_batches(session.data.eval, part_size, rig.device, settings.groups["loader"].collate)
    with (
        rig.evaluating(),
        in_evaluation(rig.model),
        same_draws_afterwards(rig.model),
        loss_in_evaluation(session.problem),
    ):
        of_parts = [part_sums(session, rig, part, metrics if counts else {}) * counts for part, counts in parts]
        sums = ranks_with_outputs().sum(torch.stack(of_parts).sum(0))
    loss, correct, num_targets, *more = sums.tolist()
    num_answers = more.pop() if len(more) > len(rig.eval_means) else num_targets
    if not num_targets:
        raise NonFinite(
            f"no target counts in the held-out samples, all are {IGNORE}: leave such samples out of the data"
        )
    scores = session.problem.scores(loss / num_targets, correct / max(num_answers, 1))
    scores |= {name: each / num_targets for name, each in zip(rig.eval_means, more, strict=True)}
    return Evaluation(loss / num_targets, scores | {name: metric.compute() for name, metric in metrics.items()})


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """Inside it the model is in evaluation mode; afterwards each module is in the mode in which it was. The fast
    path of torch's nn.TransformerEncoderLayer is off: it reads the weights of layers instead of calling them, and so
    would leave out adapters and rounding."""
    modes, is_fast = {module: module.training for module in model.modules()}, mha.get_fastpath_enabled()
    model.eval()
    mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        mha.set_fastpath_enabled(is_fast)
        model.train()  # first, as some models undo there what they do in `eval`
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def loss_in_evaluation(problem: Problem) -> Iterator[None]:
    """Inside it the modules of a criterion of the user's own are in evaluation mode. It changes nothing that the
    criterion keeps, such as a running mean."""
    holder = problem.loss_parts()
    if holder is None:
        yield
        return
    with unchanged_afterwards(holder), in_evaluation(holder):
        yield


@torch.no_grad()
def part_sums(session: Session, rig: Rig, part: Part, metrics: Mapping[str, Metric]) -> Any:
    """(loss, correct answers, targets, those of `Rig.eval_means`, and answers if those are counted otherwise than
    targets) of one part, summed: fp64. Then updates the user's metrics."""
    part = rig.own(part)
    num_answers = session.problem.num_answers(part)
    try:
        outputs = rig.forward(part)
    except StageEnds:  # another rank of the pipeline has them
        num_sums = 3 + len(rig.eval_means) + (num_answers is not None)
        return torch.zeros(num_sums, dtype=torch.float64, device=rig.device)
    loss, correct = rig.criterion(outputs, part), session.problem.num_correct(outputs, part)
    more = [sum_of(part) for sum_of in rig.eval_means.values()]
    more += [] if num_answers is None else [num_answers]
    sums = [loss, correct, session.problem.num_targets(part), *more]
    stacked = torch.stack([each.double() for each in sums])
    for metric in metrics.values():
        metric.update(outputs, part)
    return stacked
