"""A knob: one choice of how to train, as a frozen value that acts at one stage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, ClassVar

from lowvram.core.fact import Fact, ModelFact
from lowvram.core.kind import Kind
from lowvram.core.row_shape import ALONE, RowShape

if TYPE_CHECKING:
    from torch import nn

    from lowvram.core.rig import Rig
    from lowvram.core.stages import Pass


class Stage(Enum):
    """When a knob acts. `assemble` goes through the stages in this order."""

    PROCESS = auto()  # the process itself, before the device is touched
    BUILD = auto()  # the model, still without memory
    PARTITION = auto()  # its layers are split over ranks: see `Knob.partition`
    CHECKPOINT = auto()
    COMPILE = auto()
    PLACE = auto()  # on which side of the bus weights are kept
    SHARD = auto()  # after it, the weights get memory
    OPTIMIZER = auto()
    STEPPING = auto()
    LOGITS = auto()
    NUMERICS = auto()
    BATCH = auto()


# The fields of the rig that each stage may write. Stages without any patch the model in place.
WRITES: dict[Stage, frozenset[str]] = {
    Stage.PROCESS: frozenset({"finish"}),
    Stage.BUILD: frozenset({"task", "model", "criterion", "eval_means", "rounding", "over_time"}),
    Stage.PARTITION: frozenset(),
    Stage.CHECKPOINT: frozenset(),
    Stage.COMPILE: frozenset(),
    Stage.PLACE: frozenset({"shard", "sync", "finish"}),
    Stage.SHARD: frozenset({"model", "forward", "criterion", "own", "sync", "run", "total", "updated_of", "finish"}),
    Stage.OPTIMIZER: frozenset({"make_optimizer", "over_time"}),
    Stage.STEPPING: frozenset({"stepper", "run", "averaged", "evaluating"}),
    Stage.LOGITS: frozenset({"forward", "criterion"}),
    Stage.NUMERICS: frozenset({"forward", "criterion", "stepper"}),
    Stage.BATCH: frozenset({"split"}),
}


class Exactness(Enum):
    """What a knob does to the numbers of a step."""

    EXACT = "the same numbers"
    ROUNDING = "the same numbers up to rounding"
    LOSSY = "other numbers"


class Knob(ABC):
    """One choice of how to train. Subclasses are frozen dataclasses and act only in `apply`."""

    stage: ClassVar[Stage]
    group_name: ClassVar[str | None] = None  # the group whose option it is; None: its module's in lowvram/knobs
    exactness: ClassVar[Exactness] = Exactness.EXACT
    # Largest relative error of the gradients, which tests check. If EXACT: compared with the neutral option, in fp32
    # (0: equal to the bit; more: sums are in another order). Else: compared with gradients in fp64.
    band: ClassVar[float] = 0.0
    saves: ClassVar[Kind | None] = None  # the kind of memory whose maximum it reduces
    libraries: ClassVar[tuple[str, ...]] = ()  # modules that it uses; a point imports them before it measures memory
    moves_to_host: ClassVar[bool] = False  # it saves by moving data to host memory: nothing if the device is the CPU
    product_format: ClassVar[str | None] = None  # of matrix products, by its name in DeviceSpec.peak_flops_per_s
    expandable_segments: ClassVar[bool] = False  # it has CUDA's caching allocator use expandable segments
    extra_memory: ClassVar[bool] = False  # it takes much memory outside a step's tensors, as a compiler does
    # Read from a group's neutral option: whether a search tries the group's other options even if the user didn't name
    # the group. False where they decide what is learnt, or where no plan knows their time or memory.
    searched: ClassVar[bool] = True
    chosen_by_user: ClassVar[bool] = False  # it is another way to learn, which no search tries
    # Errors of torch in a step that this knob causes where a model's code doesn't fit it: a pattern of the text -> what
    # the knob needs, and what the user can do, as in `conflicts`.
    misfits: ClassVar[Mapping[str, str]] = {}
    decides_learning: ClassVar[bool] = False  # it decides what is learnt: `reference` is the knob itself
    # What `needs`, `breaks` and `remedies` return, if that doesn't depend on the knob's fields.
    needs_always: ClassVar[frozenset[Fact | ModelFact]] = frozenset()
    breaks_always: ClassVar[frozenset[Fact | ModelFact]] = frozenset()
    remedy: ClassVar[tuple[Kind, int] | None] = None

    def needs(self) -> frozenset[Fact | ModelFact]:
        """The facts without which this knob can't work."""
        return self.needs_always

    def breaks(self) -> frozenset[Fact | ModelFact]:
        """The facts that this knob takes away from the others."""
        return self.breaks_always

    def caveat(self, model: nn.Module) -> str | None:
        """One sentence if this knob changes what `model` computes (not only how), else None."""
        del model
        return None

    def reference(self) -> Knob | None:
        """This group's knob in the run without any saving that fidelity compares with: itself, if it decides what is
        learnt; else None, for the neutral option."""
        return self if self.decides_learning else None

    def remedies(self) -> Mapping[Kind, int]:
        """The kinds of memory that this option reduces, for the advice after an out-of-memory error, each with its
        priority among all options: the smallest number is offered first."""
        return {} if self.remedy is None else dict([self.remedy])

    def improves_on(self, in_use: Knob) -> bool:
        """Whether `remedies` applies if the point now uses `in_use`, another option of the group."""
        return in_use.saves is None

    def more_parts(self, num_samples: int) -> int | None:
        """How many parts to retry with after a point ran out of memory; None: no retry.

        Args:
            num_samples: of the logical batch on one rank.
        """
        del num_samples
        return None

    def for_steps(self, num_steps: int) -> Knob:
        """This knob in a run of so many updates. Default: the same in every run."""
        del num_steps
        return self

    def left_to_plan(self) -> str | None:
        """The name of the field, None so far, that a plan is to choose; None: there is nothing to choose. One of
        `lowvram.planning.choice.CHOOSERS`."""
        return None

    def chosen_value(self, numbers: Sequence[int]) -> Any:
        """What that field becomes, given the numbers that the plan has chosen."""
        return [*numbers]

    def num_parts(self) -> int:
        """In how many parts, of equal size, it has the logical batch computed."""
        return 1

    def clips_at(self) -> float | None:
        """The norm to which it scales larger gradients before an update; None: it leaves them as they are."""
        return None

    def weights_per_scale(self) -> int | None:
        """If training rounds weights to 4 bits: how many weights of a row share a scale, in an export with 4 bits, too.
        None: it doesn't matter to an export."""
        return None

    def row_shape(self, num_ranks: int) -> RowShape:
        """How it has ranks share out the model, if the point has `num_ranks`. Raises BadInput for a number that doesn't
        divide them."""
        del num_ranks
        return ALONE

    def passes(self, row: RowShape, num_parts: int) -> Sequence[Sequence[Pass]] | None:
        """Where it has stages of a model on different ranks: what each rank of a row computes of each part, in order.

        Raises BadInput for a number of parts for which there is no order.
        """
        del row, num_parts
        return None

    def partition(self, rig: Rig) -> None:
        """Split the model's layers over the ranks of a row, in place, at stage PARTITION, whatever its own stage."""
        del rig

    @abstractmethod
    def apply(self, rig: Rig) -> Rig:
        """The next rig. May write only the fields of its stage (`WRITES`)."""


class Neutral(Knob):
    """A choice to change nothing."""

    def apply(self, rig: Rig) -> Rig:
        return rig


def conflicts(
    knobs: Mapping[str, Knob], absent: Mapping[Fact, str], lacking: Mapping[ModelFact, str] | None = None
) -> list[str]:
    """Every reason why `knobs` can't work together, one sentence each.

    Args:
        knobs: the choices by the name that the user knows, such as "precision=bf16".
        absent: facts that the machine lacks, each with what the user can do about it.
        lacking: those that the model lacks; None: which these are isn't known.
    """
    remedies, reasons = {**absent, **(lacking or {})}, []
    broken = {name: knob.breaks() for name, knob in knobs.items()}
    for name, knob in knobs.items():
        for fact in _in_order(knob.needs()):
            if fact in remedies:
                reasons.append(f"{name} needs that {fact.value}: {remedies[fact]}")
            for other, facts in broken.items():
                if fact in facts:
                    reasons.append(f"{name} needs that {fact.value}, and {other} ends that")
    return reasons


def model_facts(knobs: Iterable[Knob]) -> frozenset[ModelFact]:
    """The facts about the model that knobs need."""
    return frozenset(fact for knob in knobs for fact in knob.needs() if isinstance(fact, ModelFact))


def weights_per_scale(knobs: Iterable[Knob]) -> int | None:
    """As `Knob.weights_per_scale`, of all knobs of a point."""
    return next(filter(None, (knob.weights_per_scale() for knob in knobs)), None)


def row_shape(knobs: Iterable[Knob], num_ranks: int) -> RowShape:
    """As `Knob.row_shape`, of all knobs of a point."""
    shapes = (knob.row_shape(num_ranks) for knob in knobs)
    return next((shape for shape in shapes if shape.size > 1), ALONE)


def passes_of(knobs: Iterable[Knob], row: RowShape, num_parts: int) -> Sequence[Sequence[Pass]] | None:
    """As `Knob.passes`, of all knobs of a point."""
    return next((found for knob in knobs if (found := knob.passes(row, num_parts)) is not None), None)


def is_compiled(knobs: Iterable[Knob]) -> bool:
    """Whether torch.compile compiles the model: no knob takes that fact away."""
    return not any(Fact.COMPILED in knob.breaks() for knob in knobs)


def _in_order(facts: frozenset[Fact | ModelFact]) -> list[Fact | ModelFact]:
    """Those about the machine and the other knobs first."""
    if not facts:  # of most knobs; a search asks for thousands of combinations
        return []
    others = sorted((fact for fact in facts if not isinstance(fact, Fact)), key=lambda fact: fact.value)
    return [*(fact for fact in Fact if fact in facts), *others]
