"""What the options that freeze weights have in common, and what follows for the frozen rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import nn

from lowvram.compat.torch_modules import BatchNorm
from lowvram.core.kind import Kind
from lowvram.core.knob import Exactness, Knob, Stage


class Adapter(Knob):
    """The base of this group's options, which can also save and load what they have trained."""

    stage = Stage.BUILD

    def save_adapter(self, model: nn.Module, folder: Path, base: str | None) -> bool:
        """Write only the trained weights into `folder`; returns False if they can't be separated from the base model.

        Args:
            base: the name of the base model, if it has one.
        """
        return False

    def load_adapter(self, model: nn.Module, folder: Path) -> None:
        """Load what `save_adapter` wrote into a model that this knob has changed."""

    def merged(self, model: nn.Module, make_plain: Callable[[], nn.Module]) -> nn.Module:
        """A plain model that computes the same, with the adapters merged into its weights.

        Args:
            make_plain: makes the model without adapters.
        """
        return model


class Frozen(Adapter):
    """The base of options that freeze most of the weights."""

    exactness = Exactness.LOSSY
    saves = Kind.OPTIMIZER

    def caveat(self, model: nn.Module) -> str | None:
        if not any(map(is_always_eval, model.modules())):
            return None
        return "BatchNorm layers that don't train normalise by the statistics that they came with"


def leaves(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that have parameters themselves, by their names."""
    return {name: module for name, module in model.named_modules() if any(True for _ in module.parameters(False))}


def freeze_statistics(model: nn.Module) -> None:
    """Keep every BatchNorm without trainable parameters in evaluation mode, so that its running statistics, which
    belong to the frozen weights, don't change."""
    for module in model.modules():
        if isinstance(module, BatchNorm) and not any(weight.requires_grad for weight in module.parameters(False)):
            keep_in_eval(module)


def keep_in_eval(module: nn.Module) -> None:
    """Put a module into evaluation mode, in which it stays until `let_train`."""
    if not isinstance(vars(module).get("train"), AlwaysEval):
        was_training = module.training
        module.eval()
        module.train = AlwaysEval(module, was_training)  # pyright: ignore[reportAttributeAccessIssue]


def let_train(module: nn.Module) -> None:
    """The inverse of `keep_in_eval`: the module gets the mode back that it had, which may be that of an evaluation."""
    kept = vars(module).get("train")
    if isinstance(kept, AlwaysEval):
        del module.train
        module.train(kept.was_training)


class AlwaysEval:
    """Replaces the method `train` of a module that stays in evaluation mode."""

    def __init__(self, module: nn.Module, was_training: bool) -> None:
        self.module, self.was_training = module, was_training

    def __call__(self, mode: bool = True) -> nn.Module:
        return self.module


def is_always_eval(module: nn.Module) -> bool:
    return isinstance(vars(module).get("train"), AlwaysEval)
