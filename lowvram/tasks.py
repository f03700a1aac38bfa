"""Problems: the criterion, the repeated blocks and the head of what is trained."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, final

import torch
import torch.nn.functional as F
from omegaconf import MISSING
from torch import Tensor, nn

from lowvram.config.errors import BadInput, require
from lowvram.config.importing import check_args, import_object
from lowvram.core.rig import IGNORE, Part, Task
from lowvram.core.values import Fill
from lowvram.data.spec import MASK, TEXTS, DataSpec, Modality, num_places, real_lengths


class ModelConfig(Protocol):
    """What a model's configuration offers (see lowvram/models)."""

    @property
    def modality(self) -> Modality | None:
        """What it reads; None: whatever the data are."""
        ...

    @property
    def description(self) -> str: ...

    def natural_shape(self) -> tuple[int, ...]: ...

    def make(self, spec: DataSpec) -> nn.Module: ...

    def call(self, model: nn.Module, inputs: Any) -> Any: ...

    def blocks_of(self, model: nn.Module, spec: DataSpec) -> list[nn.Module]: ...

    def head_of(self, model: nn.Module, spec: DataSpec) -> nn.Linear | None: ...

    def has_plain_blocks(self, model: nn.Module, spec: DataSpec) -> bool: ...

    def is_random(self, model: nn.Module) -> bool: ...

    def values(self, model: nn.Module, spec: DataSpec, seed: int) -> Fill: ...

    @property
    def base(self) -> str | None:
        """Where others find the weights that it starts with; None where nobody else can."""
        ...

    def save(self, model: nn.Module, spec: DataSpec, folder: Path) -> None: ...


class Problem(Task):
    """A task over a model and its data: what all of them share."""

    def __init__(self, model: ModelConfig, spec: DataSpec) -> None:
        self.model, self.spec = model, spec

    @property
    def description(self) -> str:
        """All that it is made of: two problems of one description are the same."""
        return repr((type(self).__qualname__, self.model.description, self.spec))

    def make_model(self) -> nn.Module:
        return self.model.make(self.spec)

    def call(self, model: nn.Module, inputs: Any) -> Any:
        return self.model.call(model, inputs)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return self.model.blocks_of(model, self.spec)

    def head(self, model: nn.Module) -> nn.Linear | None:
        return self.model.head_of(model, self.spec)

    def has_plain_blocks(self, model: nn.Module) -> bool:
        return self.model.has_plain_blocks(model, self.spec)

    def is_random(self, model: nn.Module) -> bool:
        return self.model.is_random(model)

    def values(self, model: nn.Module, seed: int) -> Fill:
        return self.model.values(model, self.spec, seed)

    def criterion(self, outputs: Tensor, part: Part) -> Tensor:
        """Sum of the cross-entropies in nats. outputs (..., classes); targets (...), `IGNORE` where nothing counts."""
        dtype = torch.promote_types(outputs.dtype, torch.float32)
        # Not cross_entropy on a copy in fp32: on CUDA, log_softmax writes fp32 from fp16 logits in one go. Of bf16 ones
        # torch (2.13) makes that copy itself; plain cross_entropy would spare it, but round probabilities to bf16.
        log_probabilities = F.log_softmax(outputs, -1, dtype=dtype).flatten(0, -2)
        return F.nll_loss(log_probabilities, part.targets.flatten(), ignore_index=IGNORE, reduction="sum")

    def num_correct(self, outputs: Tensor, part: Part) -> Tensor:
        """How many targets are the likeliest class (0-dim)."""
        return (outputs.argmax(-1) == part.targets).sum()

    def num_tokens(self, part: Part) -> Tensor:
        """How many of the part's tokens are no padding (0-dim); of what has no tokens, its targets."""
        if self.spec.modality is Modality.LABELLED_TOKENS:
            return part.inputs[MASK].sum()
        if self.spec.modality is Modality.TOKENS:
            return real_lengths(part.inputs, part.targets).sum()
        return self.num_targets(part)

    def filling(self, part: Part) -> Tensor:
        """`num_tokens`, and for how many there is room: (2,) int64, on the part's device."""
        num_tokens, is_text = self.num_tokens(part), self.spec.modality in TEXTS
        places = torch.full_like(num_tokens, num_places(part.inputs)) if is_text else num_tokens  # waits for no copy
        return torch.stack([num_tokens, places])

    def has_few_shapes(self) -> bool:
        return self.spec.has_few_shapes

    @abstractmethod
    def scores(self, loss: float, accuracy: float) -> dict[str, float]:
        """What an evaluation says besides its mean loss."""


class LanguageModel(Problem):
    """Each token is predicted from those before it."""

    def scores(self, loss: float, accuracy: float) -> dict[str, float]:
        return {"perplexity": float(torch.tensor(loss, dtype=torch.float64).exp()), "accuracy": accuracy}


class Classifier(Problem):
    """Each sample has one class."""

    def scores(self, loss: float, accuracy: float) -> dict[str, float]:
        return {"accuracy": accuracy}


@final
class UserProblem(Problem):
    """What an object of the user's own code says. It has `criterion(outputs, targets)`, a sum over the targets, and may
    have `count(targets)`, `num_correct(outputs, targets)`, `blocks(model)` and `head(model)`."""

    def __init__(self, model: ModelConfig, spec: DataSpec, user: Any, name: str) -> None:
        super().__init__(model, spec)
        self.user, self.name = user, name

    @property
    def description(self) -> str:
        """Includes an object address, so user code is never cached on disk."""
        return f"{super().description} {self.name} {object.__repr__(type(self.user))}"

    def offered(self, method: str) -> Any:
        """A method that the object need not have, or None."""
        return getattr(self.user, method, None)

    def criterion(self, outputs: Any, part: Part) -> Tensor:
        loss = self.user.criterion(outputs, part.targets)
        is_sum = isinstance(loss, Tensor) and loss.dim() == 0 and loss.is_floating_point()
        allowed = "a task whose criterion returns one number as a tensor, the sum of the losses of all targets"
        require(is_sum, "task.target", self.name, allowed)
        return loss

    def num_targets(self, part: Part) -> Tensor:
        count = self.offered("count")
        if count is None:
            return super().num_targets(part)
        return torch.as_tensor(count(part.targets), dtype=torch.long, device=part.targets.device)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        blocks = self.offered("blocks")
        return super().blocks(model) if blocks is None else list(blocks(model))

    def has_plain_blocks(self, model: nn.Module) -> bool:
        """Of blocks that the user names nobody knows how they are called."""
        return self.offered("blocks") is None and super().has_plain_blocks(model)

    def head(self, model: nn.Module) -> nn.Linear | None:
        """The model's own would do only if the criterion were known."""
        head = self.offered("head")
        return None if head is None else head(model)

    def num_correct(self, outputs: Any, part: Part) -> Tensor:
        count = self.offered("num_correct")
        found = 0 if count is None else count(outputs, part.targets)
        return torch.as_tensor(found, device=part.targets.device)

    def scores(self, loss: float, accuracy: float) -> dict[str, float]:
        return {} if self.offered("num_correct") is None else {"accuracy": accuracy}


@dataclass(frozen=True)
class LanguageModelling:
    """conf/task/language_modelling.yaml"""

    modalities: ClassVar[tuple[Modality, ...]] = (Modality.TOKENS,)

    def pose(self, model: ModelConfig, spec: DataSpec) -> Problem:
        check_modality("language_modelling", self.modalities, spec)
        return LanguageModel(model, spec)


@dataclass(frozen=True)
class Classification:
    """conf/task/classification.yaml"""

    modalities: ClassVar[tuple[Modality, ...]] = (Modality.IMAGES, Modality.LABELLED_TOKENS)

    def pose(self, model: ModelConfig, spec: DataSpec) -> Problem:
        check_modality("classification", self.modalities, spec)
        return Classifier(model, spec)


@dataclass(frozen=True)
class Auto:
    """conf/task/auto.yaml: the task that the data are for."""

    def pose(self, model: ModelConfig, spec: DataSpec) -> Problem:
        options = (LanguageModelling(), Classification())
        fitting = next((option for option in options if spec.modality in option.modalities), None)
        if fitting is None:
            allowed = (
                f"external for data that are {spec.modality.value}: task.target=package.module.Class says the loss"
            )
            raise BadInput("task", "auto", allowed)
        return fitting.pose(model, spec)


@dataclass(frozen=True)
class External:
    """conf/task/external.yaml"""

    target: str = MISSING
    args: dict[str, Any] | None = None

    def pose(self, model: ModelConfig, spec: DataSpec) -> Problem:
        made_by, args = import_object(self.target, "task.target"), self.args or {}
        check_args(made_by, self.target, args, "task.args")
        user = made_by(**args)
        has_criterion = callable(getattr(user, "criterion", None))
        allowed = (
            f"a class whose objects have criterion(outputs, targets): this made a {type(user).__name__} without one"
        )
        require(has_criterion, "task.target", self.target, allowed)
        return UserProblem(model, spec, user, f"{self.target} {args}")


def check_modality(option: str, wanted: tuple[Modality, ...], spec: DataSpec) -> None:
    if spec.modality not in wanted:
        allowed = f"a task over {spec.modality.value}, which the data are: leave task=auto"
        raise BadInput("task", option, allowed)
