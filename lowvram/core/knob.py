"""A knob: one choice of how to train, as a frozen value that acts at one stage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import nn

    from lowvram.core.rig import Rig


class Stage(Enum):
    """When a knob acts. `assemble` goes through the stages in this order."""

    PROCESS = auto()  # the process itself, before the device is touched
    BUILD = auto()  # the model, still without memory
    CHECKPOINT = auto()
    COMPILE = auto()
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
    Stage.CHECKPOINT: frozenset(),
    Stage.COMPILE: frozenset(),
    Stage.SHARD: frozenset({"model", "forward", "sync", "run", "total"}),
    Stage.OPTIMIZER: frozenset({"make_optimizer", "over_time"}),
    Stage.STEPPING: frozenset({"stepper", "run"}),
    Stage.LOGITS: frozenset({"forward", "criterion"}),
    Stage.NUMERICS: frozenset({"forward", "criterion", "stepper"}),
    Stage.BATCH: frozenset({"split"}),
}


class Fact(Enum):
    """Something that a knob can rely on, and that the machine or another knob can take away."""

    CUDA = "the device is an NVIDIA GPU"
    CPU = "the device is the CPU"
    TF32 = "the device multiplies in TF32"
    BF16 = "the device computes in bf16"
    FP8 = "the device multiplies in fp8"
    C_COMPILER = "a C++ compiler (for a CUDA device: a C compiler) is installed"
    KERNEL_COMPILER = "a C compiler is installed, where a CUDA device needs one for kernels of lowvram's own"
    ONE_RANK = "the point has one rank"
    MANY_RANKS = "the point has several ranks"
    HEAD = "the task knows the model's last layer"
    BLOCKS = "the task knows the model's repeated blocks"
    MLPS = "the task knows the MLPs of the model's blocks"
    SEPARATE_SAMPLES = "the blocks compute each sample from that sample alone"
    FIXED_BLOCKS = "a block computes the same in every step"
    EVERY_BLOCK = "every block computes in every step"
    SKIPPABLE = "the inputs of several blocks can stand in for their outputs"
    EXITS = "the head takes the output of an earlier block, too"
    BRANCHES = "the task knows what blocks add to their inputs"
    NORMS = "the model has layer norms or RMS norms"
    INNER_LINEARS = "the model has linear layers besides the last"
    INNER_PRODUCTS = "the model has linear layers besides the last, or convolutions of images"
    PLAIN_BLOCKS = "blocks take only tensors, as positional arguments, and return one tensor"
    GRADS_AT_UPDATE = "every gradient is alive when the update runs"
    PLAIN_BACKWARD = "the backward pass of a part is one call of autograd"
    RETAINABLE_GRAPH = "a graph can be walked backwards twice"
    EAGER_AUTOGRAD = "autograd's hooks inside a block take effect"
    EVERY_OPERATOR = "autograd sees every operator of the model"
    COMPILED = "the model is compiled"
    EAGER = "the model runs eagerly"
    FEW_SHAPES = "batches have one shape, or one of a few"
    HARD_TARGETS = "the loss compares with targets alone"
    NO_RANDOMNESS = "the model draws no random numbers"
    EXACT_ACTIVATIONS = "the backward pass reads what the forward pass has saved, to the last bit"
    PLAIN_PRODUCTS = "layers multiply by their weights as they are"
    OWN_FORMAT = "layers compute in the number format of their weights"
    FP32_WEIGHTS = "weights that train are kept in fp32"
    UNSPLIT_WEIGHTS = "a weight that trains is one number, without a correction beside it"
    WHOLE_PARAMS = "every parameter is whole on its rank"
    STEADY_WEIGHTS = "a forward pass leaves the weights as they are"
    STEADY_BLOCKS = "a block's forward pass leaves its weights as they are"
    TRAINED_BLOCKS = "the weights of the model's blocks train"
    SAME_PARAMS = "the same parameters train in every step"
    SEPARATE_UPDATES = "the update of a parameter depends on no other parameter"
    SEPARATE_MEMORY = "no two weights share memory"
    SHARDABLE = "each weight can be sharded, and is read through its module alone"
    REAL_WEIGHTS = "no weight is complex"
    FULL_LOGITS = "the logits of a part exist whole"


class Exactness(Enum):
    """What a knob does to the numbers of a step."""

    EXACT = "the same numbers"
    ROUNDING = "the same numbers up to rounding"
    LOSSY = "other numbers"


class Kind(Enum):
    """What a piece of memory holds."""

    PARAMETERS = "parameters"  # with the model's buffers
    GRADIENTS = "gradients"  # of parameters
    OPTIMIZER = "optimizer"  # its state
    ACTIVATIONS = "activations"  # made by a forward or a backward pass: kept for the backward pass, or temporary
    INPUTS = "inputs"  # the part of the logical batch that is computed; on a CPU the whole batch
    HOST = "host"  # in host memory: where knobs have moved it and, with a card, the logical batch
    OTHER = "other"  # temporaries of the update, and in a plan those inside kernels


class Knob(ABC):
    """One choice of how to train. Subclasses are frozen dataclasses and act only in `apply`."""

    stage: ClassVar[Stage]
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

    def needs(self) -> frozenset[Fact]:
        """The facts without which this knob can't work."""
        return frozenset()

    def breaks(self) -> frozenset[Fact]:
        """The facts that this knob takes away from the others."""
        return frozenset()

    def caveat(self, model: nn.Module) -> str | None:
        """One sentence if this knob changes what `model` computes (not only how), else None."""
        del model
        return None

    def reference(self) -> Knob | None:
        """This group's knob in the run without any saving that fidelity compares with: itself, if it decides what is
        learnt; None for the neutral option."""
        return None

    def remedies(self) -> Mapping[Kind, int]:
        """The kinds of memory that this option reduces, for the advice after an out-of-memory error, each with its
        priority among all options: the smallest number is offered first."""
        return {}

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

    def with_blocks(self, blocks: Sequence[int]) -> Knob | None:
        """If a plan is to choose the blocks that this knob treats: the knob that treats those with these numbers, and
        takes the less time the fewer they are. None: there is nothing to choose."""
        del blocks
        return None

    @abstractmethod
    def apply(self, rig: Rig) -> Rig:
        """The next rig. May write only the fields of its stage (`WRITES`)."""


def conflicts(knobs: Mapping[str, Knob], absent: Mapping[Fact, str]) -> list[str]:
    """Every reason why `knobs` can't work together, one sentence each.

    Args:
        knobs: the choices by the name that the user knows, such as "precision=bf16".
        absent: facts that the machine lacks, each with what the user can do about it.
    """
    reasons = []
    for name, knob in knobs.items():
        for fact in _in_order(knob.needs()):
            if fact in absent:
                reasons.append(f"{name} needs that {fact.value}: {absent[fact]}")
            for other, breaker in knobs.items():
                if fact in breaker.breaks():
                    reasons.append(f"{name} needs that {fact.value}, and {other} ends that")
    return reasons


def is_compiled(knobs: Iterable[Knob]) -> bool:
    """Whether torch.compile compiles the model: no knob takes that fact away."""
    return not any(Fact.COMPILED in knob.breaks() for knob in knobs)


def _in_order(facts: frozenset[Fact]) -> Sequence[Fact]:
    return [fact for fact in Fact if fact in facts] if facts else []
