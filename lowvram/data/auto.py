"""data=auto: data that every machine has, of the modality that the model reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from lowvram.config.errors import BadInput, require
from lowvram.data.glyphs import Glyphs
from lowvram.data.python_packages import PythonPackages
from lowvram.data.python_source import PythonSource
from lowvram.data.source import Data, FollowedModel, Source, followed_modality, require_count
from lowvram.data.spec import Modality


@final
@dataclass(frozen=True)
class Auto(Source):
    """`python_source` for a model of tokens, `python_packages` for one of labelled tokens, `glyphs` for one of images.
    Each size that is null is taken from the model."""

    modalities: ClassVar[tuple[Modality, ...]] = (Modality.TOKENS, Modality.LABELLED_TOKENS, Modality.IMAGES)

    sequence_length: int | None = None
    image_size: int | None = None
    eval_samples: int = 256

    def __post_init__(self) -> None:
        require_count("data.sequence_length", self.sequence_length)
        require_count("data.image_size", self.image_size)
        require(self.eval_samples >= 1, "data.eval_samples", self.eval_samples, "at least 1")

    def resolve(self, model: FollowedModel) -> Source:
        length, eval_samples = self.sequence_length, self.eval_samples
        sources: dict[Modality, Source] = {
            Modality.TOKENS: PythonSource(length, eval_samples=eval_samples),
            Modality.LABELLED_TOKENS: PythonPackages(length, eval_samples=eval_samples),
            Modality.IMAGES: Glyphs(self.image_size, eval_samples=eval_samples),
        }
        return sources[followed_modality("auto", model)].resolve(model)

    def open(self, seed: int) -> Data:
        raise BadInput("data", "auto", "resolved for a model first: call resolve_source")
