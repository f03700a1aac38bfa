"""The interfaces of data: a source is configured, follows the model, and is opened."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from lowvram.config import BadInput, require
from lowvram.data.spec import DataSpec, Modality

if TYPE_CHECKING:
    from torch import Tensor

FITTING_OPTIONS = {
    Modality.TOKENS: "auto, python_source, text or synthetic",
    Modality.IMAGES: "auto, glyphs, imagefolder or synthetic",
}


class FollowedModel(Protocol):
    """The part of a model's configuration that a source follows."""

    @property
    def modality(self) -> Modality: ...

    def natural_shape(self) -> tuple[int, ...]:
        """Shape of one sample's inputs when the source leaves its size open."""
        ...


class Samples(ABC):
    """A numbered set of samples."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def sample(self, index: int, epoch: int) -> tuple[Tensor, Tensor]:
        """(inputs, targets) on the CPU: a pure function of the seed, the epoch and the index.

        TOKENS: inputs and targets (sequence_length,) int64, the targets one token ahead.
        IMAGES: inputs (channels, height, width) float32, centred near 0; targets () int64.
        """


@dataclass(frozen=True)
class Data:
    """An opened source: the samples to train on, and those that are held out."""

    spec: DataSpec
    train: Samples
    eval: Samples
    description: str  # one line for the log


class Source(ABC):
    """The configuration of one option of `data`: `resolve` it for a model, then `open` it."""

    modality: ClassVar[Modality | None] = None  # None: whatever the model reads

    @abstractmethod
    def resolve(self, model: FollowedModel) -> Source:
        """This source with every size that it leaves open (null) taken from the model."""

    @abstractmethod
    def open(self, seed: int) -> Data:
        """Scans and checks everything. Raises BadInput before any tensor is made."""


def resolve_source(source: Source, model: FollowedModel) -> Source:
    """The source, ready to be opened for this model.

    Raises:
        BadInput: the model reads something else than the source holds. No file has been opened yet.
    """
    wanted = model.modality
    option = type(source).__module__.rpartition(".")[2]  # a source's module is named like its option
    allowed = f"a source of {wanted.value}, which this model reads: {FITTING_OPTIONS[wanted]}"
    require(source.modality in (None, wanted), "data", option, allowed)
    return source.resolve(model)


def require_count(key: str, value: int | None) -> None:
    """Raise BadInput unless the value is null (left to the model) or at least 1."""
    require(value is None or value >= 1, key, value, "null or at least 1")


def given(key: str, value: int | None) -> int:
    """The value. Raises BadInput for a size that nobody has chosen: the source was opened without a model."""
    if value is None:
        raise BadInput(key, None, "a number when no model is there to follow: see resolve_source")
    return value
