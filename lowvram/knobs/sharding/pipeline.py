"""sharding=pipeline: each rank has some of a model's blocks, and the parts of a batch go from rank to rank.

Huang et al., "GPipe" (2019); Narayanan et al., "PipeDream" (2019, 1F1B), "Efficient Large-Scale Language Model Training
on GPU Clusters Using Megatron-LM" (2021, interleaved); Qi et al., "Zero Bubble Pipeline Parallelism" (2023).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from lowvram.compat.torch_pipelining import OF_ONE, OF_SEVERAL, SCHEDULES
from lowvram.config.errors import Incompatible, require
from lowvram.core.fact import Fact, ModelFact
from lowvram.core.kind import Kind
from lowvram.core.mesh import PIPELINE, ranks_along
from lowvram.core.probes.draws import NO_RANDOMNESS
from lowvram.core.probes.stated import READS_BLOCKS
from lowvram.core.probes.weights import REAL_WEIGHTS, SEPARATE_MEMORY
from lowvram.core.probes.writes import STEADY_WEIGHTS
from lowvram.core.rig import Part, Rig
from lowvram.core.row_shape import RowShape
from lowvram.core.stages import (
    Pass,
    PipelineStage,
    Stages,
    hide_buffers,
    leave_here,
    put_in_stages,
    sizes_of,
    stages_of,
)
from lowvram.core.structure import BLOCKS, Structure, unless
from lowvram.knobs.sharding.cut import sizes_of_stages, stage_bounds
from lowvram.knobs.sharding.ddp import DDP
from lowvram.knobs.sharding.find_segments import FindSegments, Segments, names_of
from lowvram.knobs.sharding.fsdp import FSDP
from lowvram.knobs.sharding.held_back import HeldBack, hold_back
from lowvram.knobs.sharding.passes import HELD_BACK, check_parts, passes_of
from lowvram.knobs.sharding.pipeline_run import PipelineRun
from lowvram.knobs.sharding.zero1 import ZeRO1

LOSS_OF_OUTPUTS = ModelFact(
    "the loss reads the model's outputs alone",
    unless(
        lambda known: not known.get(READS_BLOCKS),
        "this task compares the outputs of blocks, too, and most blocks are on other ranks than the loss: choose"
        " task.feature_weight=0, sharding=fsdp or sharding=tensor",
    ),
)
SHARING: dict[str, type[ZeRO1 | FSDP]] = {"zero1": ZeRO1, "fsdp": FSDP}
DEFAULT = "ddp"


@dataclass(frozen=True)
class PipelineParallel(DDP):
    """Each rank of a row has a stage of the model: some of its blocks, the first also what stands before them, the last
    what stands after them. Parts of the batch go from stage to stage, so that all compute at once; the fewer parts, the
    longer they wait for each other. Rows share out the batch.

    Args:
        pipeline: how many ranks a row has; None: all are one row.
        schedule: in which order parts are computed. gpipe: all forward passes, then all backward passes. 1f1b: a stage
            holds as many parts at once as there are stages from it on. interleaved: the same, with several stages on
            each rank, so that ranks wait less. zero_bubble: ranks that would wait compute gradients of weights, which
            backward passes leave for later.
        stages: how many each rank has, with schedule=interleaved or zero_bubble.
        cut: how many blocks each stage has; None: so that the slowest is as fast as possible.
        cut_to_fit: whether a plan is to choose the cut: the fastest that fits. Where nothing is planned, as in a loop
            of one's own, it is the fastest.
        copies: how rows share their copies of a stage: ddp, each has all of it; zero1, the optimizer's state is shared
            out over them; fsdp, weights and gradients are sharded over them, too.
        reduce_every_part: with zero1 or fsdp: whether gradients are summed over the rows in every part, so that no rank
            keeps whole ones until the last.
    """

    pipeline: int | None = None
    schedule: str = "1f1b"
    stages: int = 1
    cut: list[int] | None = None
    cut_to_fit: bool = False
    copies: str = "ddp"
    reduce_every_part: bool = False

    saves = Kind.PARAMETERS
    needs_always = DDP.needs_always | {
        *(Fact.EAGER, Fact.GRADS_AT_UPDATE, Fact.SEPARATE_UPDATES, Fact.SAME_PARAMS, Fact.FIXED_BLOCKS),
        *(Fact.CHAINED_BLOCKS, BLOCKS, LOSS_OF_OUTPUTS, NO_RANDOMNESS, REAL_WEIGHTS, SEPARATE_MEMORY, STEADY_WEIGHTS),
    }
    breaks_always = DDP.breaks_always | {Fact.EVERY_PARAMETER, Fact.PLAIN_BACKWARD, Fact.COMPILED}

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.pipeline is None or self.pipeline > 0, "sharding.pipeline", self.pipeline, "null, or at least 1")
        require(self.schedule in SCHEDULES, "sharding.schedule", self.schedule, f"one of {', '.join(SCHEDULES)}")
        allowed = "2 or more with sharding.schedule=interleaved, 1 or more with zero_bubble, else 1"
        least = 2 if self.schedule in OF_SEVERAL else 1
        fits = self.stages == 1 if self.schedule in OF_ONE else self.stages >= least
        require(fits, "sharding.stages", self.stages, allowed)
        allowed = "at least 1 with sharding=pipeline: over how many ranks each layer of a stage is split"
        require(self.tensor is not None, "sharding.tensor", self.tensor, allowed)
        allowed = "1 with sharding=pipeline, whose stages have all tokens of their samples"
        require(self.context == 1, "sharding.context", self.context, allowed)
        known = (DEFAULT, *SHARING)
        require(self.copies in known, "sharding.copies", self.copies, f"one of {', '.join(known)}")
        allowed = "false with sharding=pipeline, whose stages have all tokens of their samples"
        require(not self.sequence, "sharding.sequence", self.sequence, allowed)

        allowed = "another one with sharding.tensor, copies=fsdp or reduce_every_part, which need gradients at once"
        needs_them = self.tensor != 1 or self.copies == "fsdp" or self.reduce_every_part
        require(self.schedule != HELD_BACK or not needs_them, "sharding.schedule", self.schedule, allowed)

        allowed = "false with several stages on a rank, whose memory a plan can't tell apart"
        require(self.stages == 1 or not self.cut_to_fit, "sharding.cut_to_fit", self.cut_to_fit, allowed)

    def left_to_plan(self) -> str | None:
        return "cut" if self.cut_to_fit and self.cut is None else None

    def costs(self, known: Structure) -> Sequence[float]:
        """Of what stands before the blocks, of each block, and of what stands after them: operations, relative to each
        other."""
        return known.get(FindSegments(names_of(known.model))).flops

    def needs(self) -> frozenset[Fact | ModelFact]:
        return super().needs() | self.sharing().needs_always

    def breaks(self) -> frozenset[Fact | ModelFact]:
        return super().breaks() | self.sharing().breaks_always

    def sharing(self) -> DDP | ZeRO1 | FSDP:
        """What the rows do with their copies."""
        if self.copies == DEFAULT:
            return DDP(tensor=self.tensor, splits=self.splits)
        kind = SHARING[self.copies]
        return kind(tensor=self.tensor, splits=self.splits, reduce_every_part=self.reduce_every_part)

    def row_shape(self, num_ranks: int) -> RowShape:
        tensor = self.tensor or 1
        require(num_ranks % tensor == 0, "sharding.tensor", tensor, f"a number that divides the {num_ranks} ranks")
        number, num_left = num_ranks // tensor if self.pipeline is None else self.pipeline, num_ranks // tensor
        of_each = "" if tensor == 1 else f" stages of {tensor} ranks each"
        allowed = f"a number that divides the {num_left}{of_each or ' ranks'}"
        require(num_left % number == 0, "sharding.pipeline", number, allowed)
        allowed = f"ddp where all {num_ranks} ranks are one pipeline: lower sharding.pipeline"
        require(self.copies == DEFAULT or num_left > number, "sharding.copies", self.copies, allowed)
        return RowShape(pipeline=number, tensor=tensor)

    def passes(self, row: RowShape, num_parts: int) -> Sequence[Sequence[Pass]] | None:
        if row.pipeline == 1:
            return None
        check_parts(self.schedule, row.pipeline, self.stages, num_parts)
        return passes_of(self.schedule, row.pipeline, self.stages, num_parts)

    def partition(self, rig: Rig) -> None:
        ranks = ranks_along(PIPELINE)
        if ranks is None:
            super().partition(rig)
            return
        known = rig.structure
        segments = known.get(FindSegments(names_of(rig.model)))
        super().partition(rig)
        num_stages = ranks.size * self.stages
        bounds = stage_bounds(sizes_of_stages(segments.flops, num_stages, self.cut))
        own = [number for number in range(num_stages) if number % ranks.size == ranks.rank]
        stages = [PipelineStage(number, *bounds[number], number == num_stages - 1) for number in own]
        readers = stages_reading(rig.model, segments, bounds)
        check_trains(rig.model, readers, num_stages)
        here = {name for name, each in readers.items() if not each.isdisjoint(own)}
        having = {name: sorted({stage % ranks.size for stage in readers[name]}) for name in sorted(here)}
        groups = {tuple(places): ranks.some(places) for places in having.values() if len(places) > 1}
        shared = {name: groups[tuple(places)] for name, places in having.items() if len(places) > 1}
        elsewhere = {name for name, each in readers.items() if min(each) not in own}
        sizes = sizes_of(rig.model)
        own_stages = Stages(stages, segments.arguments, segments.in_tuple, shared, elsewhere, sizes, readers)
        put_in_stages(rig.model, known.blocks, own_stages)
        unread = unread_buffers(rig.model, segments, here)
        hide_buffers(rig.model, elsewhere)
        leave_here(rig.model, here, unread, rig.device)

    def apply(self, rig: Rig) -> Rig:
        ranks, stages = ranks_along(PIPELINE), stages_of(rig.model)
        if ranks is None or stages is None:
            return super().apply(rig)
        held = HeldBack()
        if self.schedule == HELD_BACK:
            hold_back(rig.model, held)
        run = PipelineRun(stages, ranks, self.schedule, rig.forward, rig.device, held)
        rig = self.sharing().apply(replace(rig, forward=run.forward, run=run))

        def total_loss(final: Rig, parts: list[Part], total: Tensor) -> Tensor:
            return ranks.sum(rig.run(final, parts, total).double())  # in whatever format the last stage has it

        def finish() -> None:
            rig.finish()
            run.level_shared(rig.model)

        return replace(rig, run=total_loss, finish=finish)


def check_trains(model: nn.Module, readers: Mapping[str, frozenset[int]], num_stages: int) -> None:
    """Raises Incompatible if a stage has no weights that train."""
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    for stage in range(num_stages):
        if not any(stage in readers[name] for name in trained):
            raise Incompatible(
                f"sharding=pipeline needs weights that train in each stage, and stage {stage} has none: choose other"
                " numbers of blocks (sharding.cut), or sharding=fsdp"
            )


def unread_buffers(model: nn.Module, segments: Segments, here: Collection[str]) -> set[str]:
    """The first names of the buffers that no stage of this rank reads and no state has, such as weights in 4 bits. What
    stands before and behind the blocks is computed on every rank, though only one uses what becomes of weights."""
    kept = {*here, *model.state_dict()}  # BatchNorm wants its buffers back as a state is loaded
    outside, in_blocks = {0, segments.tail}, tuple(f"{name}." for name in segments.blocks)
    names = (name for name, _ in model.named_buffers() if name.startswith(in_blocks) and name not in kept)
    return {name for name in names if outside.isdisjoint(segments.readers.get(name, ()))}


def stages_reading(model: nn.Module, segments: Segments, bounds: list[tuple[int, int]]) -> Mapping[str, frozenset[int]]:
    """By which stages each parameter and buffer is read, by its first name. What no pass has read belongs to the stage
    of its block, or to the first."""
    last = len(bounds) - 1
    stage_of = {block + 1: stage for stage, (begin, end) in enumerate(bounds) for block in range(begin, end)}
    stage_of |= {0: 0, segments.tail: last}
    in_blocks = {f"{name}.": number for number, name in enumerate(segments.blocks, 1)}
    found: dict[str, frozenset[int]] = {}
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, _ in named:
        around = next((number for prefix, number in in_blocks.items() if name.startswith(prefix)), 0)
        found[name] = frozenset(stage_of[number] for number in segments.readers.get(name, {around}))
    return found
