"""Computes the traces of other batch sizes and numbers of parts, for one combination of knobs, from two traces.

The order of events seldom depends on the batch size, and the bytes of each event are affine in it, so two traces define
a line. Only batch sizes between the two are computed, never beyond: where code compares sizes, as offload and chunked
logits do, and takes the same branch at both ends, it takes that branch everywhere between. Where the two traces differ
in their events, every batch size is traced itself, and the result says why.

A step of more than three parts uses memory as one of three does: the first part makes gradients, the last one sends
them to other ranks, and those between are alike. Only the batch is larger, and there are more losses, one per part.
Where the first parts have a sample more than the others, up to two of each size are enough: the first and the second
of the larger ones, one of the smaller ones, and the last. Of several ranks it is the first, which has the most samples.

A rank of a pipeline holds as many parts at once as its schedule has it begin before the first backward pass. Where
forward and backward passes then take turns, two more parts are enough: in one of them, as in all that follow, a part
comes and another one goes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import NamedTuple, final

import torch

from lowvram.config.errors import Incompatible
from lowvram.core.assemble import bare_model
from lowvram.core.device import Card
from lowvram.core.fact import ModelFact
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob, Stage, conflicts, model_facts, passes_of
from lowvram.core.slices import most_in_slice
from lowvram.core.stages import Pass, Way
from lowvram.core.structure import Blocks, Structure, lacking
from lowvram.knobs.accum import Parts
from lowvram.planning.cache import TraceCache, key_of
from lowvram.planning.target import Target
from lowvram.planning.time.op_cost import Column
from lowvram.planning.trace.computed import FIXED_COLUMNS, sizes_of
from lowvram.planning.trace.events import BATCH, KINDS, PHASES, Phase, Trace
from lowvram.planning.trace.fake import fake_tensors
from lowvram.planning.trace.tracer import affects_trace, trace
from lowvram.tasks import Problem

MOST_PARTS = 3  # that are traced, if they are equal
MORE_PARTS = 2  # that are traced in a pipeline than it has ranks
MOST_ALIKE = 2  # that are traced of each size, if they are not
MIDDLE_PART = 2  # of three; parts are counted from 1
FEWEST_SAMPLES, MOST_SAMPLES = 2, 64  # of a part: the ends of a line, unless a larger size is asked for
REACHES = 16, 4  # then the upper end is this many times that size; the second is tried if the first gives no line
LOSS_BYTES = 4  # of a part: an fp32 number


class ScaledTrace(NamedTuple):
    """A point's trace, and how it was obtained."""

    trace: Trace
    is_direct: bool  # whether the point itself was traced; else its sizes were computed from other traces
    why_direct: str | None = None  # why they couldn't be computed, in half a sentence


class InTurns(NamedTuple):
    """A rank of a pipeline whose forward and backward passes take turns."""

    num_ranks: int
    num_ahead: int  # forward passes before the one that the first backward pass follows
    num_waiting: int = 0  # backward passes before the one that the first gradients of weights follow


class Split(NamedTuple):
    """The parts of a rank's slice, of which the first `num_larger` have one sample more than the others."""

    parts: int
    num_larger: int = 0
    in_turns: InTurns | None = None  # in a pipeline; else parts are computed one after another

    def shortest(self) -> Split:
        """Of as few parts as use memory alike."""
        if self.in_turns is not None:
            return self._replace(parts=min(self.parts, self.in_turns.num_ranks + MORE_PARTS))
        if not self.num_larger:
            return Split(min(self.parts, MOST_PARTS))
        num_larger, num_smaller = (min(num, MOST_ALIKE) for num in (self.num_larger, self.parts - self.num_larger))
        return Split(num_larger + num_smaller, num_larger)

    def num_samples(self, each: int) -> int:
        """Of the rank, if the smaller parts have `each`."""
        return each * self.parts + self.num_larger

    def omitted(self) -> list[Omitted]:
        """The parts that `shortest` leaves out."""
        short = self.shortest()
        if self.in_turns is not None:
            like = self.in_turns.num_ahead + self.in_turns.num_waiting + MORE_PARTS
            of_sizes = [Omitted(self.parts - short.parts, like, short.parts)]
        elif not self.num_larger:
            of_sizes = [Omitted(self.parts - short.parts, MIDDLE_PART, short.parts)]
        else:
            num_smaller = self.parts - self.num_larger - (short.parts - short.num_larger)
            of_sizes = [
                Omitted(self.num_larger - short.num_larger, MIDDLE_PART, short.num_larger),
                Omitted(num_smaller, short.num_larger + 1, short.parts),
            ]
        return [omitted for omitted in of_sizes if omitted.num]

    @property
    def has_losses(self) -> bool:
        """Whether this rank computes those of the parts."""
        return self.in_turns is None or self.in_turns.num_ahead == 0


class Omitted(NamedTuple):
    """Parts of one size that a shortest split leaves out, of which it has some. Its parts are counted from 1."""

    num: int
    like: int  # the part that computes what they do
    last: int  # the last part of that size: their losses are alive by then


TraceKey = tuple[tuple[str, ...], Split]  # the knobs that a trace depends on, and the parts traced


@dataclass
class KnownTraces:
    """The traces of one structure, and the lines between them."""

    traces: dict[int, Trace] = field(default_factory=dict)  # by samples of a part
    # By the samples at both ends; a string says why there is no line.
    lines: dict[tuple[int, int], Line | str] = field(default_factory=dict)


@final
class TraceScaler:
    """Gives the traces of the points of one problem on one target."""

    def __init__(self, problem: Problem, target: Target, cache: TraceCache | None = None) -> None:
        self.problem, self.target, self.cache = problem, target, cache
        self.known: dict[TraceKey, KnownTraces] = defaultdict(KnownTraces)
        self.lacked: dict[frozenset[ModelFact], dict[ModelFact, str]] = {}  # by the facts asked for

    def trace(self, knobs: Mapping[str, Knob], parts: int, batch_size: int) -> ScaledTrace:
        """The trace of a point whose logical batch is split into `parts` parts on each rank.

        Args:
            knobs: by the names that messages use, such as "ckpt=every1"; without `accum`.
            batch_size: of the logical batch, over all ranks.

        Raises:
            Incompatible, CantPlan: as `tracer.trace`.
        """
        assert all(knob.stage is not Stage.BATCH for knob in knobs.values())
        samples, num_larger = divmod(most_in_slice(batch_size, self.target.num_data_ranks), parts)
        assert samples, "a part without samples"
        passes = passes_of(knobs.values(), self.target.row, parts)
        in_turns = None if passes is None or num_larger else self.in_turns(passes)
        split = Split(parts, num_larger, in_turns)
        short = split.shortest() if passes is None or in_turns else split
        # Before known traces are looked up: a point with a conflict may have the same structure as one without.
        self.check({**knobs, "accum": Parts(short.parts)})
        knobs = {name: knob for name, knob in knobs.items() if affects_trace(knob)}
        known = self.known[tuple(repr(knob) for knob in knobs.values()), short]
        line = self.line(known, knobs, short, samples) if known.traces and samples not in known.traces else None
        traced = line.at(samples) if isinstance(line, Line) else self.traced(known, knobs, short, samples)
        if split.num_larger and split.omitted() and not has_parts(traced, short.parts):
            direct = trace(self.problem, {**knobs, "accum": Parts(parts)}, batch_size, self.target)
            return ScaledTrace(direct, True, "parts of unequal size can't be told apart in its traces")
        is_direct = split == short and not isinstance(line, Line)
        whole = traced if short == split else with_parts(traced, split, samples)
        return ScaledTrace(whole, is_direct, line if isinstance(line, str) else None)

    def in_turns(self, passes: Sequence[Sequence[Pass]]) -> InTurns | None:
        """None where the target's rank has several stages, or begins all parts before its first backward pass."""
        num_ranks = self.target.row.pipeline
        order = passes[self.target.rank // (self.target.num_ranks // num_ranks)]
        ways = [each.way for each in order]
        num_ahead = ways.index(Way.BACKWARD) - 1
        if len({each.stage for each in order}) > 1 or num_ahead + 1 == ways.count(Way.FORWARD):
            return None
        before_weights = ways[: ways.index(Way.WEIGHTS)] if Way.WEIGHTS in ways else []
        return InTurns(num_ranks, num_ahead, max(0, before_weights.count(Way.BACKWARD) - 1))

    def check(self, knobs: Mapping[str, Knob]) -> None:
        """Raise `Incompatible` where `tracer.trace` would, with the same message."""
        absent, needed = self.target.absent(), model_facts(knobs.values())
        reasons = conflicts(knobs, absent)
        if not reasons and needed:
            reasons = conflicts(knobs, absent, self.lacking(needed))
        if reasons:
            raise Incompatible("; ".join(reasons))

    def lacking(self, asked: frozenset[ModelFact]) -> dict[ModelFact, str]:
        """Those of the facts that the model lacks."""
        if asked not in self.lacked:
            with fake_tensors(self.target):
                known = self.known_model()
                known.get(Blocks())  # raises BadInput if there are none of the class that the user names
                self.lacked[asked] = lacking(known, asked)
        return self.lacked[asked]

    def known_model(self) -> Structure:
        """What is known of the model, as it is before knobs change it."""
        return self.problem.structure(bare_model(self.problem))

    def line(self, known: KnownTraces, knobs: Mapping[str, Knob], split: Split, samples: int) -> Line | str:
        """A line between two traces that covers `samples` samples of a part; or why there is none."""
        if samples < FEWEST_SAMPLES:
            return "torch treats dimensions of one element differently"
        below = max((size for size in known.traces if FEWEST_SAMPLES <= size < samples), default=FEWEST_SAMPLES)
        if below == samples:
            return "it is the smallest size"
        larger = [size for size in known.traces if size > samples]
        if larger:
            return self.line_between(known, knobs, split, below, min(larger))
        farther, nearer = (max(MOST_SAMPLES, reach * samples) for reach in REACHES)
        line = self.line_between(known, knobs, split, below, farther)
        return line if isinstance(line, Line) else self.line_between(known, knobs, split, below, nearer)

    def line_between(
        self, known: KnownTraces, knobs: Mapping[str, Knob], split: Split, below: int, above: int
    ) -> Line | str:
        """The line through the traces of two numbers of samples; computed once."""
        if (below, above) not in known.lines:
            ends = {end: self.traced(known, knobs, split, end) for end in (below, above)}
            known.lines[below, above] = line_through(ends, self.target.card)
        return known.lines[below, above]

    def traced(self, known: KnownTraces, knobs: Mapping[str, Knob], split: Split, samples: int) -> Trace:
        """The trace of this number of samples, made once in this process, and with a cache once on this machine."""
        if samples not in known.traces:
            all_knobs = {**knobs, "accum": Parts(split.parts)}
            batch_size = split.num_samples(samples) * self.target.num_data_ranks
            key = key_of(self.problem, all_knobs, batch_size, self.target)
            traced = self.cache.get(key) if self.cache else None
            if traced is None:
                traced = trace(self.problem, all_knobs, batch_size, self.target)
                if self.cache:
                    self.cache.put(key, traced)
            known.traces[samples] = traced
        return known.traces[samples]


@dataclass(frozen=True)
class Line:
    """The traces of a structure whose sizes are affine in the samples of a part."""

    trace: Trace
    samples: int  # of a part of `trace`
    slope: torch.Tensor  # (events,) int64: the growth of `Trace.num_bytes` per further sample
    work_slope: torch.Tensor  # (operators, columns) int64: that of `Trace.work`
    computed_slope: torch.Tensor  # (pairs, columns) int64: that of `Trace.computed`
    card: Card | None

    def at(self, samples: int) -> Trace:
        more = samples - self.samples
        num_bytes, work = self.trace.num_bytes + self.slope * more, self.trace.work + self.work_slope * more
        if self.card is not None:
            computed = self.trace.computed + self.computed_slope * more
            births, sizes = computed[:, 0], sizes_of(self.card, computed)
            num_bytes[births], num_bytes[births + 1] = sizes.unbind(1)
        return self.trace.sized(num_bytes, work)


def line_through(traced: Mapping[int, Trace], card: Card | None = None) -> Line | str:
    """The line through two traces; or why there is none, in half a sentence.

    Args:
        card: that they were made for.
    """
    (first, one), (second, other) = traced.items()
    if one.makers != other.makers or not torch.equal(one.kinds, other.kinds):
        return "other tensors are made at another batch size"
    if not torch.equal(one.storages, other.storages) or not torch.equal(one.phases, other.phases):
        return "tensors live and die in another order at another batch size"
    if not torch.equal(one.work[:, : Column.FLOPS], other.work[:, : Column.FLOPS]):
        return "other operators run at another batch size"
    computed_slope = even_slope(one.computed, other.computed, second - first)
    work_slope = even_slope(one.work, other.work, second - first)
    slope = even_slope(without_computed(one), without_computed(other), second - first)
    if slope is None or work_slope is None or computed_slope is None or computed_slope[:, FIXED_COLUMNS].any():
        return "sizes don't grow evenly with the batch"
    return Line(one, first, slope, work_slope, computed_slope, card)


def without_computed(trace: Trace) -> torch.Tensor:
    """The bytes of a trace's events, without those that don't grow evenly."""
    num_bytes, births = trace.num_bytes.clone(), trace.computed[:, 0]
    num_bytes[births] = num_bytes[births + 1] = 0
    return num_bytes


def even_slope(one: torch.Tensor, other: torch.Tensor, distance: int) -> torch.Tensor | None:
    """By how much each number grows per sample; None if that is no whole number for one of them."""
    growth = other - one
    slope = growth.div(distance, rounding_mode="floor")
    return slope if torch.equal(slope * distance, growth) else None


def with_parts(trace: Trace, split: Split, samples: int) -> Trace:
    """The trace of a step of a split, from the trace of its shortest.

    Args:
        samples: of a part; of the smaller ones.
    """
    short = split.shortest()
    is_batch = torch.tensor([maker == BATCH for maker in trace.makers])
    growth = Fraction(split.num_samples(samples), short.num_samples(samples))
    grown = trace.num_bytes // growth.denominator * growth.numerator
    num_bytes = torch.where(is_batch[trace.storages], grown, trace.num_bytes)
    work = trace.work.clone()
    for num, like, _ in split.omitted():
        work[work[:, Column.PART] == like, Column.TIMES] *= 1 + num
    trace = replace(trace, num_bytes=num_bytes, work=work)
    for starts, end in reversed(steps_of(trace)):
        for num, _, last in reversed(split.omitted() if split.has_losses else []):
            trace = with_losses(trace, starts[last - 1 - short.parts], end, num)
            end += num  # that many births come before it
    return trace


def has_parts(trace: Trace, num_parts: int) -> bool:
    """Whether each step has as many forward passes as parts: not where these follow one another without a backward
    pass, or are made twice."""
    return all(len(starts) == num_parts for starts, _ in steps_of(trace))


def steps_of(trace: Trace) -> list[tuple[list[int], int]]:
    """For each step, the events at which the forward passes of its parts begin, and that at which the update does."""
    changes = torch.cat([torch.tensor([0]), (trace.phases[1:] != trace.phases[:-1]).nonzero()[:, 0] + 1]).tolist()
    starts: list[int] = []
    steps: list[tuple[list[int], int]] = []
    for at in changes:
        phase = PHASES[trace.phases[at]]
        if phase is Phase.FORWARD:
            starts.append(at)
        if phase is Phase.UPDATE:
            steps.append((starts, at))
            starts = []
    return steps


def with_losses(trace: Trace, start: int, end: int, num: int) -> Trace:
    """The trace with the losses of `num` more parts, alive from event `start` to before event `end`."""
    serials = torch.arange(num) + len(trace.kinds)
    born, gone = torch.full((num,), LOSS_BYTES), torch.zeros(num, dtype=torch.int64)

    def with_both(column: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        return torch.cat([column[:start], before, column[start:end], after, column[end:]])

    forward, update = (torch.full((num,), PHASES.index(phase)) for phase in (Phase.FORWARD, Phase.UPDATE))
    return replace(
        trace,
        storages=with_both(trace.storages, serials, serials),
        num_bytes=with_both(trace.num_bytes, born, gone),
        phases=with_both(trace.phases, forward, update),
        kinds=torch.cat([trace.kinds, torch.full((num,), KINDS.index(Kind.ACTIVATIONS))]),
        makers=trace.makers + ["the loss of a part"] * num,
        streams=torch.cat([trace.streams, torch.zeros(num, dtype=torch.int64)]),
        second_step=trace.second_step + (2 * num if end <= trace.second_step else 0),
    )
