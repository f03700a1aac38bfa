"""The interfaces of data: a source is configured, follows the model, and is opened."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, final

from lowvram.config.errors import BadInput, require
from lowvram.data.spec import DataSpec, Modality, TextRules

if TYPE_CHECKING:
    from torch import Tensor

FITTING_OPTIONS = {
    Modality.TOKENS: "auto, python_source, text, hub, external or synthetic",
    Modality.LABELLED_TOKENS: "auto, python_packages, hub (with data.label), external or synthetic",
    Modality.IMAGES: "auto, glyphs, imagefolder, hub (with data.image), external or synthetic",
    Modality.OTHER: "external",
}


class FollowedModel(Protocol):
    """The part of a model's configuration that a source follows."""

    @property
    def modality(self) -> Modality | None:
        """What it reads; None: whatever the data are."""
        ...

    @property
    def text_rules(self) -> TextRules: ...

    def check_packed(self) -> None:
        """Raises BadInput unless sequences of one row are kept apart that count their positions from 0 each."""
        ...

    def reading(self, modality: Modality) -> FollowedModel:
        """The same, if it reads whatever the data are, once they are known to be such."""
        ...

    def natural_shape(self) -> tuple[int, ...]:
        """Shape of one sample's inputs when the source leaves its size open."""
        ...


class Samples(ABC):
    """A numbered set of samples."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def sample(self, index: int, epoch: int) -> tuple[Any, Tensor]:
        """(inputs, targets) on the CPU: a pure function of the seed, the epoch and the index.

        TOKENS: inputs and targets (sequence_length,) int64, the targets one token ahead.
        LABELLED_TOKENS: inputs {"input_ids", "attention_mask"}, each (sequence_length,) int64; targets () int64.
        IMAGES: inputs (channels, height, width) float32, centred near 0; targets () int64.
        """


class Texts(Samples):
    """Samples of tokens whose lengths differ: what follows the last real token is padding."""

    @property
    @abstractmethod
    def room(self) -> int:
        """Tokens of a sample, with padding."""

    @abstractmethod
    def length(self, index: int, epoch: int) -> int:
        """How many tokens of a sample are real: at least 1."""

    def longest(self, num_samples: int) -> int:
        """How many real tokens so many samples have at most, all together; more where nobody has counted."""
        return num_samples * self.room


@dataclass(frozen=True)
class Data:
    """An opened source: the samples to train on, and those that are held out."""

    spec: DataSpec
    train: Samples
    eval: Samples
    description: str  # one line for the log


class Source(ABC):
    """The configuration of one option of `data`: `resolve` it for a model, then `open` it."""

    modalities: ClassVar[tuple[Modality, ...]] = tuple(Modality)  # what its samples can be

    @abstractmethod
    def resolve(self, model: FollowedModel) -> Source:
        """This source with every size that it leaves open (null) taken from the model."""

    @abstractmethod
    def open(self, seed: int) -> Data:
        """Scans and checks everything. Raises BadInput before any tensor is made."""


class TextSource(Source):
    """A source that does what the model asks of texts. `resolve` it into a `Following`."""

    @abstractmethod
    def read(self, rules: TextRules, seed: int) -> Data:
        """Like `open`."""

    def open(self, seed: int) -> Data:
        return self.read(TextRules(), seed)


@final
@dataclass(frozen=True)
class Following(Source):
    """A source of texts, and what the model asks of them."""

    source: TextSource
    rules: TextRules

    def resolve(self, model: FollowedModel) -> Source:
        return self

    def open(self, seed: int) -> Data:
        return self.source.read(self.rules, seed)


def resolve_source(source: Source, model: FollowedModel) -> Source:
    """The source, ready to be opened for this model.

    Raises:
        BadInput: the model reads something else than the source holds. No file has been opened yet.
    """
    option = type(source).__module__.rpartition(".")[2]  # a source's module is named like its option
    check_modality(option, source.modalities, model)
    only, *others = source.modalities
    return source.resolve(model if others else model.reading(only))


def check_modality(option: str, held: tuple[Modality, ...], model: FollowedModel) -> None:
    """Raises BadInput unless the model reads something that the option can hold."""
    wanted = model.modality
    if wanted is not None and wanted not in held:
        allowed = f"a source of {wanted.value}, which this model reads: {FITTING_OPTIONS[wanted]}"
        raise BadInput("data", option, allowed)


def followed_modality(option: str, model: FollowedModel) -> Modality:
    """What the model reads, for an option that has something for each kind of model."""
    if model.modality is None:
        kinds = ", ".join(kind.name for kind in FITTING_OPTIONS if kind is not Modality.OTHER)
        raise BadInput("model.reads", None, f"one of {kinds} with data={option}, which follows the model")
    return model.modality


def require_count(key: str, value: int | None) -> None:
    """Raise BadInput unless the value is null (left to the model) or at least 1."""
    require(value is None or value >= 1, key, value, "null or at least 1")


def given(key: str, value: int | None) -> int:
    """The value. Raises BadInput for a size that nobody has chosen: the source was opened without a model."""
    if value is None:
        raise BadInput(key, None, "a number when no model is there to follow: see resolve_source")
    return value
