"""Problems: a model and its data, with the criterion and the scores of training it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, final
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
from lowvram.core.outputs import all_outputs
from lowvram.core.probes.blocks import FoundBlocks
from lowvram.core.probes.stated import HAS_FEW_SHAPES
from lowvram.core.rig import IGNORE, Part, Task
from lowvram.core.structure import Blocks, Probe, Stating, Structure
from lowvram.core.torch_losses import labels_named, sum_and_count
from lowvram.core.values import Fill
from lowvram.data.source import Data
from lowvram.data.spec import TEXTS, DataSpec, Modality, described, num_places, num_real_tokens
from lowvram.models.config import ModelConfig

BYTES = ", whose images can be made float32 in the data set (image.float() / 255)"
FEW_TOKENS = 16  # of each sample, in forward passes that only show how blocks are called
KNOWN: dict[str, dict[Probe[Any], Any]] = {}  # what was found of models, by the descriptions of problems


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

    def structure(self, model: nn.Module) -> Structure:
        found = KNOWN.setdefault(self.description, {})
        return Structure(model, self.call, self.inputs, self.short_inputs, self.stated(), found)

    def stated(self) -> Stating:
        """What is known without a trial."""
        return {**self.model.stated(), HAS_FEW_SHAPES: lambda known: self.spec.has_few_shapes}

    def inputs(self, num_samples: int) -> Any:
        """Inputs of so many samples, on the CPU."""
        with without_dispatch_modes():  # a plan doesn't count these inputs
            inputs, _ = self.spec.example(num_samples)
        return inputs

    def short_inputs(self, num_samples: int) -> Any:
        """The same; of texts the first tokens alone."""
        inputs = self.inputs(num_samples)
        if self.spec.modality not in TEXTS:
            return inputs
        return tree_map_only(Tensor, lambda tensor: tensor[:, :FEW_TOKENS] if tensor.dim() > 1 else tensor, inputs)

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

    def stated(self) -> Stating:
        return {**super().stated(), Blocks(): self.named_blocks}

    def named_blocks(self, known: Structure) -> FoundBlocks:
        """The blocks and the head that the user's object names. How the model calls such blocks isn't known; and the
        model's own head is the head only for a cross-entropy."""
        found = super().stated().get(Blocks(), Blocks().find)(known)
        blocks, head = self.optional_method("blocks"), self.optional_method("head")
        if blocks is not None:
            names = tuple(self.name_of(block, known.model, "blocks") for block in blocks(known.model))
            found = found._replace(blocks=names, has_plain_blocks=False)
        layer = None if head is None else head(known.model)
        return found._replace(head=None if layer is None else self.name_of(layer, known.model, "head"))

    def name_of(self, part: Any, model: nn.Module, method: str) -> str:
        name = next((name for name, module in model.named_modules() if module is part), None)
        if name is None:
            raise BadInput("task.target", f"{method}(model)", f"modules of the model: {type(part).__name__} is none")
        return name

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


class OneOfOurs(TaskConfig):
    """A task with a criterion of lowvram's, for data of some modalities."""

    option: ClassVar[str]
    modalities: ClassVar[tuple[Modality, ...]]
    problem: ClassVar[type[Problem]] = LanguageModel

    def pose(self, model: ModelConfig, spec: DataSpec) -> Problem:
        if spec.modality not in self.modalities:
            allowed = f"a task that reads {spec.modality.value}, as these data are: leave task=auto"
            raise BadInput("task", self.option, allowed)
        return self.problem(model, spec)


@dataclass(frozen=True)
class LanguageModelling(OneOfOurs):
    """conf/task/language_modelling.yaml"""

    option = "language_modelling"
    modalities = (Modality.TOKENS,)


@dataclass(frozen=True)
class MaskedLanguageModelling(OneOfOurs):
    """conf/task/masked_language_modelling.yaml"""

    option = "masked_language_modelling"
    modalities = (Modality.MASKED_TOKENS,)


@dataclass(frozen=True)
class Seq2Seq(OneOfOurs):
    """conf/task/seq2seq.yaml"""

    option = "seq2seq"
    modalities = (Modality.PAIRS,)


@dataclass(frozen=True)
class Classification(OneOfOurs):
    """conf/task/classification.yaml"""

    option = "classification"
    modalities = (Modality.IMAGES, Modality.LABELLED_TOKENS)
    problem = Classifier


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
