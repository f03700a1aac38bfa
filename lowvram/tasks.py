"""Problems: a model and its data, with the criterion and the scores of training it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, final
from weakref import WeakSet

import torch
import torch.nn.functional as F
from omegaconf import MISSING
from torch import Tensor, nn

from lowvram.compat.torch_modes import without_dispatch_modes
from lowvram.compat.torch_trees import tree_map_only
from lowvram.config.errors import BadInput, require
from lowvram.config.importing import check_args, import_object
from lowvram.config.settings import Settings
from lowvram.core.criterion import UserCriterion
from lowvram.core.loss_parts import Holder
from lowvram.core.rig import IGNORE, Method, Part, Tail, Task, named_tensors
from lowvram.core.torch_losses import labels_named, sum_and_count
from lowvram.core.values import Fill
from lowvram.data.source import Data
from lowvram.data.spec import TEXTS, DataSpec, Modality, described, num_places, num_real_tokens
from lowvram.models.draw_finder import find_draw
from lowvram.models.mlp_finder import USUAL_NAMES, find_mlps
from lowvram.models.outputs import all_outputs
from lowvram.models.restless_finder import Deeds, find_deeds
from lowvram.models.sample_finder import find_separate_blocks
from lowvram.models.shape_finder import find_same_shape
from lowvram.models.stray_finder import find_stray
from lowvram.models.uncalled_finder import find_uncalled
from lowvram.models.write_finder import Written, find_written


class ModelConfig(Protocol):
    """The interface of a model's configuration (see lowvram/models)."""

    @property
    def modality(self) -> Modality | None:
        """What kind of data the model reads; None: any."""
        ...

    @property
    def description(self) -> str: ...

    def natural_shape(self) -> tuple[int, ...]: ...

    def make(self, spec: DataSpec) -> nn.Module: ...

    def call(self, model: nn.Module, inputs: Any) -> Any: ...

    def blocks_of(self, model: nn.Module, spec: DataSpec) -> list[nn.Module]: ...

    def head_of(self, model: nn.Module, spec: DataSpec) -> nn.Linear | None: ...

    def last_of(self, model: nn.Module, spec: DataSpec) -> list[str]: ...

    def has_plain_blocks(self, model: nn.Module, spec: DataSpec) -> bool: ...

    def blocks_trouble(self, model: nn.Module, spec: DataSpec) -> str | None: ...

    def branches_of(self, model: nn.Module) -> list[list[nn.Module]]: ...

    def tail_of(self, model: nn.Module) -> Tail | None: ...

    def values(self, model: nn.Module, spec: DataSpec, seed: int) -> Fill: ...

    @property
    def base(self) -> str | None:
        """The folder or hub name of the pretrained weights that the model starts with; None if there are none."""
        ...

    def save(self, model: nn.Module, spec: DataSpec, folder: Path) -> None: ...

    def save_companions(self, folder: Path) -> None:
        """Write the files that belong to the model and hold no weights, such as a tokenizer's."""
        ...


BYTES = ", whose images can be made float32 in the data set (image.float() / 255)"
FEW_TOKENS = 16  # of each sample, in forward passes that only show how blocks are called
FOUND_SEPARATE: dict[str, dict[str, int]] = {}  # by the description of a problem
FOUND_SAME_SHAPE: dict[str, dict[str, int]] = {}  # by the description of a problem
FOUND_STRAYS: dict[str, str | None] = {}
FOUND_UNCALLED: dict[str, frozenset[str]] = {}
FOUND_WRITTEN: dict[str, Written] = {}
FOUND_DRAWS: dict[str, str | None] = {}  # by the description of a problem
FOUND_DEEDS: dict[str, Deeds] = {}  # by it, and by the blocks and compiled modules
FOUND_MLPS: dict[str, tuple[tuple[str, str], ...]] = {}  # by the description of a problem, and the names sought


class Problem(Task):
    """A task made of a model and the description of its data; the base of all tasks here."""

    def __init__(self, model: ModelConfig, spec: DataSpec) -> None:
        self.model, self.spec = model, spec

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.model).__name__}, {self.spec.modality.value})"

    @property
    def description(self) -> str:
        """Everything that defines the problem, as text: problems with the same description are the same."""
        return repr((type(self).__qualname__, self.model.description, self.spec))

    def make_model(self) -> nn.Module:
        return self.model.make(self.spec)

    def call(self, model: nn.Module, inputs: Any) -> Any:
        return self.model.call(model, inputs)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return self.model.blocks_of(model, self.spec)

    def head(self, model: nn.Module) -> nn.Linear | None:
        return self.model.head_of(model, self.spec)

    def last_weights(self, model: nn.Module) -> set[Tensor]:
        return super().last_weights(model) | named_tensors(model, self.model.last_of(model, self.spec))

    def mlps(self, model: nn.Module, names: Sequence[str] | None = None) -> list[Method]:
        key = f"{self.description} {names}"
        if key not in FOUND_MLPS:
            with without_dispatch_modes():  # a plan doesn't count these inputs
                inputs, _ = self.spec.example(2)
            FOUND_MLPS[key] = find_mlps(model, self.call, inputs, self.blocks(model), names or USUAL_NAMES)
        return [Method(model.get_submodule(owner), method) for owner, method in FOUND_MLPS[key]]

    def separate_blocks(self, model: nn.Module) -> dict[nn.Module, int]:
        if self.description not in FOUND_SEPARATE:
            found = find_separate_blocks(model, self.call, self.short_inputs, self.blocks(model))
            FOUND_SEPARATE[self.description] = found
        return {model.get_submodule(name): count for name, count in FOUND_SEPARATE[self.description].items()}

    def same_shape_blocks(self, model: nn.Module) -> dict[nn.Module, int]:
        if self.description not in FOUND_SAME_SHAPE:
            found = find_same_shape(model, self.call, self.short_inputs(2), self.blocks(model))
            FOUND_SAME_SHAPE[self.description] = found
        return {model.get_submodule(name): count for name, count in FOUND_SAME_SHAPE[self.description].items()}

    def branches(self, model: nn.Module) -> list[list[nn.Module]]:
        return self.model.branches_of(model)

    def tail(self, model: nn.Module) -> Tail | None:
        return self.model.tail_of(model)

    def short_inputs(self, num_samples: int) -> Any:
        """Inputs of so many samples, on the CPU; of texts the first tokens alone."""
        with without_dispatch_modes():  # a plan doesn't count these inputs
            inputs, _ = self.spec.example(num_samples)
        if self.spec.modality not in TEXTS:
            return inputs
        return tree_map_only(Tensor, lambda tensor: tensor[:, :FEW_TOKENS] if tensor.dim() > 1 else tensor, inputs)

    def has_plain_blocks(self, model: nn.Module) -> bool:
        return self.model.has_plain_blocks(model, self.spec)

    def drawn_by(self, model: nn.Module) -> str | None:
        if self.description not in FOUND_DRAWS:
            FOUND_DRAWS[self.description] = find_draw(model, self.call, self.short_inputs(2))
        return FOUND_DRAWS[self.description]

    def uncalled(self, model: nn.Module) -> frozenset[str]:
        if self.description not in FOUND_UNCALLED:
            FOUND_UNCALLED[self.description] = find_uncalled(model, self.call, self.short_inputs(2))
        return FOUND_UNCALLED[self.description]

    def stray(self, model: nn.Module) -> str | None:
        if self.description not in FOUND_STRAYS:
            FOUND_STRAYS[self.description] = find_stray(model, self.call, self.short_inputs(2), self.blocks(model))
        return FOUND_STRAYS[self.description]

    def written(self, model: nn.Module) -> tuple[str | None, str | None]:
        if self.description not in FOUND_WRITTEN:
            found = find_written(model, self.call, self.short_inputs(2), self.blocks(model))
            FOUND_WRITTEN[self.description] = found
        return FOUND_WRITTEN[self.description]

    def deeds(
        self, model: nn.Module, blocks: Sequence[nn.Module], compiled: Sequence[nn.Module]
    ) -> tuple[str | None, str | None]:
        key = f"{self.description} {len(blocks)} {[type(each).__qualname__ for each in compiled]}"
        if key not in FOUND_DEEDS:
            FOUND_DEEDS[key] = find_deeds(model, self.call, self.short_inputs(2), blocks, compiled)
        return FOUND_DEEDS[key]

    def blocks_trouble(self, model: nn.Module) -> str | None:
        return self.model.blocks_trouble(model, self.spec)

    def values(self, model: nn.Module, seed: int) -> Fill:
        return self.model.values(model, self.spec, seed)

    def criterion(self, outputs: Tensor, part: Part) -> Tensor:
        """Sum of the cross-entropies in nats. outputs (..., classes); targets (...), `IGNORE` where nothing counts."""
        check_rows(outputs, part.targets)
        dtype = torch.promote_types(outputs.dtype, torch.float32)
        # Not cross_entropy on an fp32 copy: on CUDA, log_softmax reads fp16 logits and writes fp32 without one. For
        # bf16 torch (2.13) makes the copy itself; cross_entropy on bf16 would avoid it, but round probabilities to
        # bf16.
        log_probabilities = F.log_softmax(outputs, -1, dtype=dtype).flatten(0, -2)
        with labels_named(log_probabilities.shape[-1], IGNORE):
            return F.nll_loss(log_probabilities, part.targets.flatten(), ignore_index=IGNORE, reduction="sum")

    def loss_parts(self) -> Holder | None:
        """What a criterion of the user's own consists of; None of ours, which hold nothing."""
        return None

    def num_answers(self, part: Part) -> Tensor | None:
        """How many targets `num_correct` may count (0-dim); None: as many as `num_targets`."""
        del part
        return None

    def num_correct(self, outputs: Tensor, part: Part) -> Tensor:
        """For how many targets the largest output is right (0-dim)."""
        return (outputs.argmax(-1) == part.targets).sum()

    def num_tokens(self, part: Part) -> Tensor:
        """The number of tokens without padding (0-dim); for images, the number of targets."""
        is_text = self.spec.modality in TEXTS
        return num_real_tokens(part.inputs, part.targets) if is_text else self.num_targets(part)

    def token_counts(self, part: Part) -> Tensor:
        """The number of tokens without padding, and with it: (2,) int64, on the part's device."""
        num_tokens, is_text = self.num_tokens(part), self.spec.modality in TEXTS
        places = torch.full_like(num_tokens, num_places(part.inputs)) if is_text else num_tokens  # waits for no copy
        return torch.stack([num_tokens, places])

    def has_few_shapes(self) -> bool:
        return self.spec.has_few_shapes

    @abstractmethod
    def scores(self, loss: float, accuracy: float) -> dict[str, float]:
        """The scores of an evaluation besides its mean loss, by name."""


def check_rows(outputs: Any, targets: Tensor) -> None:
    """Raises BadInput unless logits (..., classes) have a row for each target (...)."""
    shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    allowed = f"one whose logits have a row for each target: they are {shape}, and the targets {tuple(targets.shape)}"
    require(isinstance(outputs, Tensor) and outputs.shape[:-1] == targets.shape, "model", "logits", allowed)


class LanguageModel(Problem):
    """Tokens are predicted: each from those before it, masked ones from the others, or a text from another."""

    def scores(self, loss: float, accuracy: float) -> dict[str, float]:
        return {"perplexity": float(torch.tensor(loss, dtype=torch.float64).exp()), "accuracy": accuracy}


class Classifier(Problem):
    """Each sample has one class."""

    def criterion(self, outputs: Tensor, part: Part) -> Tensor:
        """As of any problem. Raises BadInput if the model has fewer outputs than there are classes."""
        num_outputs, num_classes = outputs.shape[-1], self.spec.num_classes
        allowed = f"a model with an output for each of the data's {num_classes} classes (data.num_classes)"
        require(num_outputs >= num_classes, "model", f"{num_outputs} outputs", allowed)
        return super().criterion(outputs, part)

    def scores(self, loss: float, accuracy: float) -> dict[str, float]:
        return {"accuracy": accuracy}


@final
class UserProblem(Problem):
    """A task whose methods an object of the user's own class provides. It must have `criterion(outputs, targets)`,
    which returns the sum over the targets, or be one of torch's losses. It may have `count(targets)`,
    `num_correct(outputs, targets)`, `blocks(model)` and `head(model)`."""

    def __init__(self, model: ModelConfig, spec: DataSpec, user: Any, name: str) -> None:
        super().__init__(model, spec)
        self.user, self.name = user, name
        count = getattr(user, "count", None)
        self.sum_of_losses = UserCriterion(getattr(user, "criterion", user), "task.target", name, count)
        self.models = WeakSet[nn.Module]()  # that were made for this task
        self.sum_of_losses.models = lambda: self.models

    @property
    def description(self) -> str:
        """Includes an object address, so user code is never cached on disk."""
        return f"{super().description} {self.name} {object.__repr__(type(self.user))}"

    def make_model(self) -> nn.Module:
        model = super().make_model()
        self.models.add(model)
        return model

    def call(self, model: nn.Module, inputs: Any) -> Any:
        """The model's logits or, where samples have several targets, everything that the model returns."""
        return all_outputs(model, inputs) if self.spec.has_several_targets else super().call(model, inputs)

    def optional_method(self, method: str) -> Any:
        """A method of the user's object, or None if it has none of this name."""
        return getattr(self.user, method, None)

    def criterion(self, outputs: Any, part: Part) -> Tensor:
        return self.sum_of_losses(outputs, part.targets)

    def num_targets(self, part: Part) -> Tensor:
        return self.sum_of_losses.num_targets(part)

    def num_answers(self, part: Part) -> Tensor | None:
        return part.num_targets

    def in_parts(self, num_parts: int) -> None:
        self.sum_of_losses.num_parts = num_parts

    def loss_parts(self) -> Holder:
        return self.sum_of_losses.holder

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        blocks = self.optional_method("blocks")
        return super().blocks(model) if blocks is None else list(blocks(model))

    def has_plain_blocks(self, model: nn.Module) -> bool:
        """False for blocks that the user's object names: how the model calls those isn't known."""
        return self.optional_method("blocks") is None and super().has_plain_blocks(model)

    def head(self, model: nn.Module) -> nn.Linear | None:
        """Only a head that the user's object names: the model's own is the head only for a cross-entropy."""
        head = self.optional_method("head")
        return None if head is None else head(model)

    def num_correct(self, outputs: Any, part: Part) -> Tensor:
        count = self.optional_method("num_correct")
        num_correct = 0 if count is None else count(outputs, part.targets)
        return torch.as_tensor(num_correct, device=part.device)

    def scores(self, loss: float, accuracy: float) -> dict[str, float]:
        return {} if self.optional_method("num_correct") is None else {"accuracy": accuracy}


class TaskConfig(ABC):
    """The configuration of an option of `task`."""

    @abstractmethod
    def pose(self, model: ModelConfig, spec: DataSpec) -> Problem:
        """The problem of this model and these data. Raises BadInput if they don't fit the task."""

    def attached(self, data: Data, settings: Settings) -> Data:
        """The data with what else the task reads with its samples. Raises BadInput if that doesn't belong to them."""
        del settings
        return data


@dataclass(frozen=True)
class LanguageModelling(TaskConfig):
    """conf/task/language_modelling.yaml"""

    modalities: ClassVar[tuple[Modality, ...]] = (Modality.TOKENS,)

    def pose(self, model: ModelConfig, spec: DataSpec) -> Problem:
        check_modality("language_modelling", self.modalities, spec)
        return LanguageModel(model, spec)


@dataclass(frozen=True)
class MaskedLanguageModelling(TaskConfig):
    """conf/task/masked_language_modelling.yaml"""

    modalities: ClassVar[tuple[Modality, ...]] = (Modality.MASKED_TOKENS,)

    def pose(self, model: ModelConfig, spec: DataSpec) -> Problem:
        check_modality("masked_language_modelling", self.modalities, spec)
        return LanguageModel(model, spec)


@dataclass(frozen=True)
class Seq2Seq(TaskConfig):
    """conf/task/seq2seq.yaml"""

    modalities: ClassVar[tuple[Modality, ...]] = (Modality.PAIRS,)

    def pose(self, model: ModelConfig, spec: DataSpec) -> Problem:
        check_modality("seq2seq", self.modalities, spec)
        return LanguageModel(model, spec)


@dataclass(frozen=True)
class Classification(TaskConfig):
    """conf/task/classification.yaml"""

    modalities: ClassVar[tuple[Modality, ...]] = (Modality.IMAGES, Modality.LABELLED_TOKENS)

    def pose(self, model: ModelConfig, spec: DataSpec) -> Problem:
        check_modality("classification", self.modalities, spec)
        return Classifier(model, spec)


@dataclass(frozen=True)
class Auto(TaskConfig):
    """conf/task/auto.yaml: the task that fits the data."""

    def pose(self, model: ModelConfig, spec: DataSpec) -> Problem:
        options = (LanguageModelling(), MaskedLanguageModelling(), Seq2Seq(), Classification())
        fitting = next((option for option in options if spec.modality in option.modalities), None)
        if fitting is None:
            shown = f" ({described(spec.layout)})" if spec.layout else ""
            data = f"data that are {spec.modality.value}{shown}{BYTES if 'uint8' in shown else ''}"
            allowed = f"external for {data}: name a class with the loss in task.target=package.module.Class"
            raise BadInput("task", "auto", allowed)
        return fitting.pose(model, spec)


@dataclass(frozen=True)
class External(TaskConfig):
    """conf/task/external.yaml"""

    target: str = MISSING
    args: dict[str, Any] | None = None

    def pose(self, model: ModelConfig, spec: DataSpec) -> Problem:
        made_by, args = import_object(self.target, "task.target"), self.args or {}
        check_args(made_by, self.target, args, "task.args")
        user = made_by(**args)
        has_criterion = callable(getattr(user, "criterion", None)) or sum_and_count(user) is not None
        allowed = (
            "one of torch's losses for outputs and targets, such as torch.nn.MSELoss, or a class whose objects have "
            f"criterion(outputs, targets): this made a {type(user).__name__} without one"
        )
        require(has_criterion, "task.target", self.target, allowed)
        return UserProblem(model, spec, user, f"{self.target} {args}")


def check_modality(option: str, wanted: tuple[Modality, ...], spec: DataSpec) -> None:
    if spec.modality not in wanted:
        allowed = f"a task that reads {spec.modality.value}, as these data are: leave task=auto"
        raise BadInput("task", option, allowed)
