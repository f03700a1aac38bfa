"""Predicts how long a step takes in a pipeline, whose stages wait for each other.

A rank's forward pass of a part takes as long as those of all parts, divided by their number; the same for backward
passes. Passes follow one another in the order of the schedule, each as soon as its rank is free and what it is given
has arrived. Messages run beside the computation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, final

from torch import Tensor

from lowvram.core.stages import Pass, Way
from lowvram.planning.time.op_cost import STREAMS, Column, Stream
from lowvram.planning.time.roofline import Rates, StepTime, is_on, messages_s, step_time
from lowvram.planning.trace.events import PHASES, Phase


class RankTime(NamedTuple):
    """How long a rank takes for its share of a step, in ms."""

    whole: StepTime  # without waiting for other stages
    forward_ms: float  # of a part, in one of its stages
    backward_ms: float
    weights_ms: float  # of gradients that a backward pass has left for later
    send_ms: float  # of what a stage hands on of a part; gradients that come back take as long
    rest_ms: float  # outside these passes: the update, sums of gradients, messages about weights that stages share


def pipeline_time(
    works: Sequence[Tensor], passes: Sequence[Sequence[Pass]], rates: Rates, link_bytes_per_s: float | None
) -> StepTime | None:
    """The time of a step, as the rank spends it that computes longest; None if a rate that it needs isn't known.

    Args:
        works: `Trace.work` of a rank of each stage, in the order of the pipeline.
        passes: of each of these, in order.
    """
    if link_bytes_per_s is None:
        return None
    ranks: list[RankTime] = []
    for work, order in zip(works, passes, strict=True):
        num_passes = sum(each.way is Way.FORWARD for each in order)
        rank = rank_time(work, num_passes, rates, link_bytes_per_s)
        if rank is None:
            return None
        ranks.append(rank)
    slowest = max(ranks, key=lambda rank: rank.whole.step_ms)
    step_ms = Span(ranks, passes).ms() + max(rank.rest_ms for rank in ranks)
    return replace(slowest.whole, bubble_ms=max(0.0, step_ms - slowest.whole.step_ms))


def rank_time(work: Tensor, num_passes: int, rates: Rates, link_bytes_per_s: float) -> RankTime | None:
    """None if a rate isn't known.

    Args:
        num_passes: of a direction, over all of its stages.
    """
    whole = step_time(work, rates, link_bytes_per_s)
    if whole is None:
        return None

    def passes_ms(phase: Phase) -> float:
        computed = step_time(work[is_in(work, phase) & ~is_on(work, [Stream.BY_DATA])], rates, link_bytes_per_s)
        assert computed is not None
        return computed.step_ms / num_passes

    forward_ms, backward_ms, weights_ms = (passes_ms(phase) for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHTS))
    along = work[:, Column.STREAM] == STREAMS.index(Stream.BY_PIPELINE)
    sent_ms = 1e3 * messages_s(work, link_bytes_per_s) * work[:, Column.TIMES]
    send_ms = float(sent_ms[along & is_in(work, Phase.FORWARD)].sum()) / num_passes
    about_weights_ms = max(0.0, float(sent_ms[along].sum()) - 2 * num_passes * send_ms)
    in_passes_ms = num_passes * (forward_ms + backward_ms + weights_ms)
    rest_ms = max(0.0, whole.step_ms - in_passes_ms) + about_weights_ms
    whole = replace(whole, ranks_ms=whole.ranks_ms + about_weights_ms)
    return RankTime(whole, forward_ms, backward_ms, weights_ms, send_ms, rest_ms)


def is_in(work: Tensor, phase: Phase) -> Tensor:
    """(operators,): whether a line of `Trace.work` belongs to the phase."""
    return work[:, Column.PHASE] == PHASES.index(phase)


@final
class Span:
    """The passes of a step, from the first to the last.

    Args:
        passes: of each rank, in order.
    """

    def __init__(self, ranks: Sequence[RankTime], passes: Sequence[Sequence[Pass]]) -> None:
        self.ranks, self.left = ranks, [deque(order) for order in passes]
        self.last_stage = max(each.stage for order in passes for each in order)
        self.ended_ms: dict[Pass, float] = {}  # each when it has ended
        self.free_ms = [0.0] * len(ranks)  # each rank when it has computed what it could so far

    def ms(self) -> float:
        while any(self.left):
            num_ended = len(self.ended_ms)
            for rank in range(len(self.ranks)):
                self.advance(rank)
            assert len(self.ended_ms) > num_ended, "passes that wait for each other"
        return max(self.free_ms)

    def advance(self, rank: int) -> None:
        """Let a rank compute until it is given something that isn't there yet."""
        order, time = self.left[rank], self.ranks[rank]
        while order and (given_ms := self.given_ms(order[0])) is not None:
            taken_ms = {Way.FORWARD: time.forward_ms, Way.BACKWARD: time.backward_ms, Way.WEIGHTS: time.weights_ms}
            self.free_ms[rank] = max(given_ms, self.free_ms[rank]) + taken_ms[order[0].way]
            self.ended_ms[order.popleft()] = self.free_ms[rank]

    def given_ms(self, each: Pass) -> float | None:
        """When what a pass is given has arrived; None: that isn't known yet."""
        before = before_pass(each, self.last_stage)
        if before is None:
            return 0.0
        if before not in self.ended_ms:
            return None
        ahead = min(before.stage, each.stage)  # of the boundary between them
        sent_ms = 0.0 if before.stage == each.stage else self.ranks[ahead % len(self.ranks)].send_ms
        return self.ended_ms[before] + sent_ms


def before_pass(each: Pass, last_stage: int) -> Pass | None:
    """The pass that makes what this one is given; None: it starts with the samples."""
    if each.way is Way.FORWARD:
        return each._replace(stage=each.stage - 1) if each.stage else None
    if each.way is Way.WEIGHTS:
        return each._replace(way=Way.BACKWARD)
    return each._replace(way=Way.FORWARD) if each.stage == last_stage else each._replace(stage=each.stage + 1)
