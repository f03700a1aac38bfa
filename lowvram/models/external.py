"""model=external: anybody's nn.Module, from a class or function of the user's own code or of another library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, final

from omegaconf import MISSING
from torch import nn

from lowvram.config.errors import BadInput, require
from lowvram.config.importing import check_args, import_object
from lowvram.core.mesh import tell_once
from lowvram.core.model_copies import copied
from lowvram.core.references import Unfollowed
from lowvram.data.spec import DataSpec, Modality
from lowvram.models import layout
from lowvram.models.third_party import ForeignModel, without_values
from lowvram.models.wrappers import unwrapped

# The words that model.args may contain, each with the figure of the data that replaces it.
FROM_DATA: dict[str, Callable[[DataSpec], Any]] = {
    "data.num_classes": lambda spec: spec.num_classes,
    "data.vocab_size": lambda spec: spec.num_tokens,
    "data.sequence_length": lambda spec: spec.shape[0],
    "data.num_channels": lambda spec: spec.shape[0],
    "data.image_size": lambda spec: spec.shape[-1],
}


@dataclass(frozen=True)
class ExternalConfig(ForeignModel):
    """A class or function that makes the model, and its arguments.

    Raises:
        BadInput: a value out of range; it names `model.<field>`.
    """

    target: str = MISSING
    args: dict[str, Any] | None = None
    reads: Modality | None = None
    sequence_length: int = 128
    image_size: int = 64
    blocks: str | None = None

    def __post_init__(self) -> None:
        require(self.sequence_length > 0, "model.sequence_length", self.sequence_length, "a positive number")
        require(self.image_size > 0, "model.image_size", self.image_size, "a positive number")
        for name, value in (self.args or {}).items():
            is_known = not isinstance(value, str) or not value.startswith("data.") or value in FROM_DATA
            require(is_known, f"model.args.{name}", value, f"a value, or one of {', '.join(FROM_DATA)}")

    @property
    def modality(self) -> Modality | None:
        return self.reads

    @property
    def description(self) -> str:
        """Includes an object address, so user code is never cached on disk."""
        return f"{self!r} {object.__repr__(self.import_object())}"

    def check_packed(self) -> None:
        raise BadInput(
            "loader", "packed", "bucketed: it isn't known whether model=external keeps sequences of one row apart"
        )

    def reading(self, modality: Modality) -> ExternalConfig:
        """The configuration for this kind of data, unless `model.reads` is set."""
        return self if self.reads else replace(self, reads=modality)

    def natural_shape(self) -> tuple[int, ...]:
        if self.reads is Modality.IMAGES:
            return (3, self.image_size, self.image_size)
        return (self.sequence_length,)

    def import_object(self) -> Callable[..., Any]:
        """Import the class or function that `model.target` names."""
        return import_object(self.target, "model.target")

    def make(self, spec: DataSpec) -> nn.Module:
        key = f"{self.description} {spec!r}"
        if key not in SKELETONS:
            try:
                SKELETONS[key] = without_values(partial(self.build, spec))
            except Unfollowed as error:
                allowed = (
                    f"a model that can be copied: {error}; make that in forward(), or keep it outside of the model"
                )
                raise BadInput("model.target", self.target, allowed) from None
        return copied(SKELETONS[key], "meta")

    def save(self, model: nn.Module, spec: DataSpec, folder: Path) -> None:
        layout.save(model, self, spec, folder)

    def build(self, spec: DataSpec) -> nn.Module:
        target = self.import_object()
        args = {name: with_data(value, spec) for name, value in (self.args or {}).items()}
        check_args(target, self.target, args, "model.args")
        model = target(**args)
        allowed = f"a class or function that makes an nn.Module: this made a {type(model).__name__}"
        require(isinstance(model, nn.Module), "model.target", self.target, allowed)
        inner, left = unwrapped(model)
        if left:
            what = f"what {', '.join(sorted({*left}))} of torch wraps is trained and saved without that wrapper"
            tell_once(f"model.target={self.target}: {what}: compile=blocks compiles, sharding=ddp takes several cards")
        return inner


@final
@dataclass(frozen=True)
class HandedOver(ExternalConfig):
    """The same, with a class or function that the caller passes, so that nothing is imported by name."""

    maker: Callable[..., Any] = nn.Module

    def import_object(self) -> Callable[..., Any]:
        return self.maker


SKELETONS: dict[str, nn.Module] = {}  # models without values


def with_data(value: Any, spec: DataSpec) -> Any:
    """The argument, with a word of `FROM_DATA` replaced."""
    return FROM_DATA[value](spec) if isinstance(value, str) and value in FROM_DATA else value
