"""The interfaces of data: a source is configured, resolved for the model, and opened."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, final

import torch

from lowvram.config.errors import BadInput, require
from lowvram.config.registry import node_of, options_of
from lowvram.config.schema import find_target
from lowvram.core.rig import Part
from lowvram.data.image_rules import ImageRules
from lowvram.data.randomness import Key, reading_order
from lowvram.data.spec import DataSpec, Modality, TextRules


class FollowedModel(Protocol):
    """The part of a model's configuration that a source takes sizes and text rules from."""

    @property
    def modality(self) -> Modality | None:
        """What it reads; None: anything, as the data have it."""
        ...

    @property
    def text_rules(self) -> TextRules: ...

    def check_packed(self) -> None:
        """Raises BadInput unless the model can keep the sequences of a row apart by their positions, each from 0."""
        ...

    def reading(self, modality: Modality) -> FollowedModel:
        """The model with its modality set to `modality`, where it was open."""
        ...

    def natural_shape(self) -> tuple[int, ...]:
        """Shape of one sample's inputs, for sizes that the source leaves open."""
        ...


class Cache(Protocol):
    """What the loader keeps of decoded images (image_cache.py)."""

    def around(self, images: Any) -> Any:
        """The same images, through the cache."""
        ...

    def figures(self, device: torch.device) -> Mapping[str, float]:
        """What it holds, and which share of all images came from it, on all ranks, for a run's row: numbers by their
        dotted paths there. A collective, whose tensors are on `device`."""
        ...


class Unfit(Exception):
    """A sample can't be used. The message says why."""


class Samples(ABC):
    """A numbered set of samples."""

    is_ordered = False  # whether samples can only be read one after another, in the order of their numbers
    is_decoded = False  # whether they are images that are decoded anew each time

    def keys(self, seed: int, start: int) -> Iterator[Key]:
        """Index and epoch of each sample in the order of training, from position `start` on, without end."""
        return reading_order(len(self), seed, start)

    @abstractmethod
    def __len__(self) -> int: ...

    def through(self, cache: Cache) -> Samples:
        """The same samples, with images that come through a cache; of those that `is_decoded`."""
        raise NotImplementedError

    @abstractmethod
    def sample(self, index: int, epoch: int) -> tuple[Any, Any]:
        """(inputs, targets) on the CPU: a pure function of the seed, the epoch and the index.

        TOKENS: inputs and targets (sequence_length,) int64, the targets one token ahead.
        LABELLED_TOKENS: inputs {"input_ids", "attention_mask"}, each (sequence_length,) int64; targets () int64.
        IMAGES: inputs (channels, height, width) float32, centred near 0; targets () int64.
        """

    def with_soft(self, part: Part, keys: list[Key]) -> Part:
        """The part made of the samples with these keys, with what a teacher has said of them, if it has."""
        del keys
        return part


class Texts(Samples):
    """Samples of tokens whose lengths differ: padding follows the last real token."""

    padded_length: int  # tokens of a sample, padding included

    @abstractmethod
    def length(self, index: int, epoch: int) -> int:
        """How many tokens of a sample are real: at least 1."""

    def longest(self, num_samples: int) -> int:
        """An upper bound of the real tokens of any `num_samples` samples, all together."""
        return num_samples * self.padded_length

    def longest_of_each(self) -> list[int]:
        """The samples that are longest in one of several texts, where a sample has several."""
        return []


@dataclass(frozen=True)
class Data:
    """An opened source: the samples to train on, and those that are held out."""

    spec: DataSpec
    train: Samples
    eval: Samples
    description: str  # one line for the log
    cache: Cache | None = None  # of decoded images
    is_repeatable: bool = True  # whether a sample is the same each time; the user's own code may draw

    def figures(self, device: torch.device) -> Mapping[str, float]:
        """What the loader has made of them, for a run's row, as `Cache.figures`. A collective: all ranks must call
        it."""
        return {} if self.cache is None else self.cache.figures(device)


class Source(ABC):
    """The configuration of one option of `data`: `resolve` it for a model, then `open` it."""

    modalities: ClassVar[tuple[Modality, ...]] = tuple(Modality)  # what its samples can be
    only_with: ClassVar[Mapping[Modality, str]] = {}  # the key that has to be given for samples to be such

    @abstractmethod
    def resolve(self, model: FollowedModel) -> Source:
        """This source with every size that it leaves open (null) taken from the model."""

    @abstractmethod
    def open(self, seed: int) -> Data:
        """Scans and checks everything. Raises BadInput before any tensor is made."""


class ResolvedSource(Source):
    """A source that leaves nothing open."""

    @final
    def resolve(self, model: FollowedModel) -> Source:
        return self


class TextSource(Source):
    """A source of texts, read by the model's rules: `resolve` returns a `ResolvedTextSource`, which holds them."""

    @abstractmethod
    def read(self, rules: TextRules, seed: int) -> Data:
        """`open` with the rules of the model."""

    def open(self, seed: int) -> Data:
        return self.read(TextRules(), seed)


@final
@dataclass(frozen=True)
class ResolvedTextSource(ResolvedSource):
    """A source of texts with the rules of a model."""

    source: TextSource
    rules: TextRules

    def open(self, seed: int) -> Data:
        return self.source.read(self.rules, seed)


class ImageSource(Source):
    """A source of images, read by the model's rules: `resolve` returns a `ResolvedImageSource`, which holds them."""

    @abstractmethod
    def read_images(self, rules: ImageRules, seed: int) -> Data:
        """`open` with the rules of the model."""


@final
@dataclass(frozen=True)
class ResolvedImageSource(ResolvedSource):
    """A source of images with the rules of a model."""

    modalities: ClassVar[tuple[Modality, ...]] = (Modality.IMAGES,)

    source: ImageSource
    rules: ImageRules

    def open(self, seed: int) -> Data:
        return self.source.read_images(self.rules, seed)


def resolve_source(source: Source, model: FollowedModel) -> Source:
    """The source, ready to be opened for this model.

    Raises:
        BadInput: the source has no samples that the model reads. No file has been opened yet.
    """
    option = type(source).__module__.rpartition(".")[2]  # a source's module is named like its option
    check_modality(option, source.modalities, model)
    only, *others = source.modalities
    return source.resolve(model if others else model.reading(only))


def check_modality(option: str, held: tuple[Modality, ...], model: FollowedModel) -> None:
    """Raises BadInput unless the model reads one of the modalities in `held`."""
    wanted = model.modality
    if wanted is not None and wanted not in held:
        allowed = f"a source of {wanted.value}, which this model reads: {fitting_options(wanted)}"
        raise BadInput("data", option, allowed)


def fitting_options(wanted: Modality) -> str:
    """The options of conf/data that hold such samples: auto, then those made for them, then those for several kinds."""
    sources: dict[str, Any] = {
        name: find_target("data", node_of("data", name)["_target_"]) for name in options_of("data")
    }
    held = {option: source for option, source in sources.items() if wanted in source.modalities}
    names = sorted(held, key=lambda option: (option != "auto", len(held[option].modalities) > 1, option))
    keys = {option: held[option].only_with.get(wanted) for option in names}
    *others, last = [f"{option} (with {key})" if key else option for option, key in keys.items()]
    return f"{', '.join(others)} or {last}" if others else last


def followed_modality(option: str, model: FollowedModel) -> Modality:
    """What the model reads, for an option that has data of several modalities. Raises BadInput if that is open."""
    if model.modality is None:
        kinds = ", ".join(kind.name for kind in Modality if kind is not Modality.OTHER)
        raise BadInput("model.reads", None, f"one of {kinds} with data={option}, which follows the model")
    return model.modality


def require_count(key: str, value: int | None) -> None:
    """Raise BadInput unless the value is null (left to the model) or at least 1."""
    require(value is None or value >= 1, key, value, "null or at least 1")


def resolved_size(key: str, value: int | None) -> int:
    """The value. Raises BadInput if it is null: the source was opened without `resolve`."""
    if value is None:
        raise BadInput(key, None, "a number, or taken from a model: call resolve_source first")
    return value
