"""data=external: data sets that a function of the user makes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import numpy as np
import torch
from omegaconf import MISSING
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lowvram.config.errors import BadInput, BadSample, require
from lowvram.config.importing import check_args, import_object
from lowvram.config.texts import first_line
from lowvram.core.rig import IGNORE
from lowvram.data.iterable import Iterated, in_their_order, is_iterable, kept
from lowvram.data.misread import check_image, check_targets
from lowvram.data.randomness import Key, Stream, seeded
from lowvram.data.source import Data, FollowedModel, Samples, Source, Texts, Unfit, require_count
from lowvram.data.spec import (
    DECODER_IDS,
    IDS,
    MASK,
    TEXTS,
    DataSpec,
    Layout,
    Modality,
    TensorLayout,
    described,
    real_lengths,
    tree_of,
)

TARGET_NAMES = ("labels", "label", "targets", "target")  # the target's key in a dictionary; the first match counts
SHOWN = 16  # samples that show what their targets are
FEW = 1000  # up to this many samples are all read to find the largest label
# numpy's usual dtypes -> those that models take
NARROW = (torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32)
WIDER = {torch.float64: torch.float32, **dict.fromkeys(NARROW, torch.int64)}
WIDER_TARGETS = WIDER | {torch.uint8: torch.int64}  # classes and masks
CLASS = TensorLayout((), "int64")


@final
@dataclass(frozen=True)
class External(Source):
    """Two datasets, to train on and held out: what `target` returns for `args`. Python's, numpy's and torch's
    generators are seeded for each sample, so random transforms repeat after resuming and with any number of workers.
    Map-style ones are shuffled; iterable ones are read in their own order.

    Raises:
        BadInput: there is no such function, it returns something else, or its samples can't be used.
    """

    modalities: ClassVar[tuple[Modality, ...]] = tuple(Modality)

    target: str = MISSING
    args: dict[str, Any] | None = None
    num_classes: int | None = None
    vocab_size: int | None = None
    eval_samples: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_classes", "vocab_size", "eval_samples"):
            require_count(f"data.{name}", getattr(self, name))

    def resolve(self, model: FollowedModel) -> Source:
        # A model that doesn't fix its vocabulary has no such field.
        return replace(self, vocab_size=self.vocab_size or getattr(model, "vocab_size", None))

    def open(self, seed: int) -> Data:
        train, held_out = self.datasets(seed)
        num_held = min(self.eval_samples or len(held_out), len(held_out))
        first = Reader("the samples to train on", train, Stream.TRAIN, seed)
        second = Reader("the samples held out", held_out, Stream.EVAL, seed)
        try:
            layout = layout_of(*first.read(0, 0))
            spec = self.spec(UserSamples(first, layout, 0), layout)
            samples = [UserSamples(reader, layout, spec.num_classes) for reader in (first, second)]
            for user_samples in samples:
                user_samples.check_known()
        except Unfit as error:
            raise BadInput("data.target", self.target, f"a function whose samples can be used: {error}") from None
        kind = f"{spec.modality.value}, {spec.num_classes} classes" if spec.num_classes else spec.modality.value
        description = f"{self.target}: {kind}, {num_samples(train)} to train on, {num_held} held out"
        held = FirstSamples(samples[1], num_held)
        if spec.modality in TEXTS and not samples[0].is_ordered:
            both = MeasuredTexts(samples[0], spec.shape[0]), MeasuredTexts(held, spec.shape[0])
            return Data(spec, *both, description, is_repeatable=False)
        return Data(spec, samples[0], held, description, is_repeatable=False)

    def datasets(self, seed: int) -> tuple[Any, Any]:
        """The two datasets that the user's function returns."""
        target = import_object(self.target, "data.target")
        args = self.args or {}
        check_args(target, self.target, args, "data.args")
        with seeded(Stream.POOL, seed):
            datasets = target(**args)
        allowed = "a function that returns a pair of datasets, to train on and held out: this returned"
        is_pair = isinstance(datasets, tuple | list) and len(datasets) == 2
        require(is_pair, "data.target", self.target, f"{allowed} a {type(datasets).__name__}")
        for dataset in datasets:
            if fault := fault_of(dataset):
                raise BadInput("data.target", self.target, f"{allowed} a {type(dataset).__name__}{fault}")
            with seeded(Stream.POOL, seed):
                is_empty = not any(True for _ in dataset) if is_iterable(dataset) else len(dataset) == 0
            require(not is_empty, "data.target", self.target, f"{allowed} an empty {type(dataset).__name__}")
        train, held_out = datasets
        if is_iterable(held_out):
            held_out = kept(held_out, self.num_kept(held_out), seed)
        return Iterated(train, Stream.TRAIN, seed) if is_iterable(train) else train, held_out

    def num_kept(self, held_out: Any) -> int:
        """How many samples of an iterable held-out set are read. Raises BadInput if nothing says it."""
        if self.eval_samples is None and not isinstance(held_out, Sized):
            allowed = "how many held-out samples are read, because the data set doesn't know how many it has"
            raise BadInput("data.eval_samples", None, allowed)
        return self.eval_samples or len(held_out)

    def spec(self, train: UserSamples, layout: Layout) -> DataSpec:
        """What the layout of the first sample says of the data."""
        modality, (_, first) = modality_of(layout), layout.inputs[0]
        if modality is Modality.IMAGES:
            check_image(first.shape)
        check_targets(modality, train.first())
        if modality is Modality.TOKENS:
            return DataSpec(modality, self.num_classes or self.vocab_size or num_labels(train), first.shape)
        if modality in (Modality.MASKED_TOKENS, Modality.PAIRS):
            vocab_size, ids = self.num_classes or self.vocab_size or num_labels(train), dict(layout.inputs)[IDS]
            usual = modality is Modality.MASKED_TOKENS and len(layout.inputs) == 2
            return DataSpec(modality, vocab_size, ids.shape, layout=None if usual else layout)
        is_classified = modality is not Modality.OTHER or layout.targets == CLASS
        num_classes = self.num_classes or (num_labels(train) if is_classified else 0)
        if modality is not Modality.LABELLED_TOKENS:
            return DataSpec(modality, num_classes, first.shape, layout=layout if modality is Modality.OTHER else None)
        if self.vocab_size is None:
            raise BadInput("data.vocab_size", None, "how many tokens there are, because the model doesn't fix it")
        inputs = dict(layout.inputs)
        usual = {IDS, MASK} == inputs.keys()
        shape, unusual = inputs[IDS].shape, None if usual else layout
        return DataSpec(modality, num_classes, shape, self.vocab_size, unusual, is_padded=train.reader.brings_mask())


@final
@dataclass(frozen=True)
class Reader:
    """Reads samples of a user's dataset as tensors, each with its own random seed."""

    name: str  # of these samples, in messages
    dataset: Any
    stream: Stream
    seed: int

    def sample(self, index: int, epoch: int) -> Any:
        """The sample as the user's dataset returns it."""
        with seeded(self.stream, self.seed, epoch, index):
            return self.dataset[index]

    def brings_mask(self) -> bool:
        """Whether samples come with an attention mask."""
        sample = self.sample(0, 0)
        inputs = sample if isinstance(sample, Mapping) else sample[0]
        return isinstance(inputs, Mapping) and MASK in inputs

    def read(self, index: int, epoch: int) -> tuple[Any, Any]:
        try:
            return as_tensors(self.sample(index, epoch))
        except Unfit as error:
            raise Unfit(f"number {index} of {self.name} is {error}") from None


@final
class UserSamples(Samples):
    """Samples of a user's dataset, each checked to have the layout of the first."""

    def __init__(self, reader: Reader, layout: Layout, num_classes: int) -> None:
        self.reader, self.layout, self.num_classes = reader, layout, num_classes

    @property
    def is_ordered(self) -> bool:
        return isinstance(self.reader.dataset, Iterated)

    def keys(self, seed: int, start: int) -> Iterator[Key]:
        return in_their_order(start) if self.is_ordered else super().keys(seed, start)

    def __len__(self) -> int:
        return len(self.reader.dataset)

    def first(self) -> Iterator[tuple[Any, Any]]:
        """Some samples from the start; one of those that can only be read in their order."""
        num_samples = 1 if self.is_ordered else min(SHOWN, len(self))
        return (self.reader.read(index, 0) for index in range(num_samples))

    def sample(self, index: int, epoch: int) -> tuple[Any, Any]:
        try:
            return self.checked(index, epoch)
        except Unfit as error:
            raise BadSample(str(error)) from None

    def checked(self, index: int, epoch: int) -> tuple[Any, Any]:
        inputs, targets = self.reader.read(index, epoch)
        place, layout = f"number {index} of {self.reader.name}", layout_of(inputs, targets)
        if layout != self.layout:
            raise Unfit(f"{place} has {described(layout)}, where the first has {described(self.layout)}")
        if self.num_classes and isinstance(targets, Tensor) and targets.dtype is torch.int64:
            outside = targets[self.is_outside(targets)]
            if len(outside):
                label, classes = int(outside[0]), f"{self.num_classes} classes that start at 0"
                raise Unfit(f"{place} has the label {label}, outside the {classes} (data.num_classes)")
        return inputs, targets

    def is_outside(self, targets: Tensor) -> Tensor:
        """Which labels belong to no class."""
        return (targets != IGNORE) & ((targets < 0) | (targets >= self.num_classes))

    def check_known(self) -> None:
        """Raises Unfit for the first sample, or one with a label of no class where the data set shows all labels."""
        self.checked(0, 0)
        known = known_targets(self.reader.dataset)
        if known is not None and self.num_classes and not known.is_floating_point():
            is_outside = self.is_outside(known).flatten(1).any(1) if known.dim() > 1 else self.is_outside(known)
            for index in is_outside.nonzero().flatten().tolist():
                self.checked(index, 0)  # a transform may make another label of it


@final
class FirstSamples(Samples):
    """The first `num_samples` of other samples."""

    def __init__(self, samples: Samples, num_samples: int) -> None:
        self.samples, self.num_samples = samples, num_samples

    def __len__(self) -> int:
        return self.num_samples

    def sample(self, index: int, epoch: int) -> tuple[Any, Any]:
        return self.samples.sample(index, epoch)


@final
class MeasuredTexts(Texts):
    """Texts of unknown lengths: a sample is read to find how many of its tokens are real."""

    def __init__(self, samples: Samples, padded_length: int) -> None:
        self.samples, self.padded_length = samples, padded_length

    def __len__(self) -> int:
        return len(self.samples)

    def length(self, index: int, epoch: int) -> int:
        inputs, targets = self.samples.sample(index, epoch)
        return int(real_lengths(inputs, targets))

    def sample(self, index: int, epoch: int) -> tuple[Any, Tensor]:
        return self.samples.sample(index, epoch)


def fault_of(dataset: Any) -> str | None:
    """Why a value can't be used as a data set; None: it can."""
    if isinstance(dataset, DataLoader):
        return "; batches are made by lowvram"
    if is_iterable(dataset):
        return ", which can be read only once" if iter(dataset) is dataset else None
    is_map_style = isinstance(dataset, Sized) and "__getitem__" in dir(dataset)
    return None if is_map_style else ", which has no length or items"


def num_samples(train: Any) -> str:
    """How many samples a data set has, in words."""
    try:
        return f"{len(train)} samples"
    except TypeError:
        return "samples of unknown number"


def num_labels(train: UserSamples) -> int:
    """One more than the largest label.

    Raises:
        BadInput: finding it would read too many samples.
        Unfit: a sample differs from the first.
    """
    if train.is_ordered:
        raise BadInput("data.num_classes", None, "given: the data set can only be read in its own order")
    targets = known_targets(train.reader.dataset)
    if targets is not None:
        return max(int(targets.max()) + 1, 1)
    allowed = f"given: the dataset has no `targets`, and its {len(train)} samples are too many to read all of them"
    require(len(train) <= FEW, "data.num_classes", None, allowed)
    return max(int(train.checked(index, 0)[1].max()) + 1 for index in range(len(train)))


def known_targets(dataset: Any) -> Tensor | None:
    """The targets of all samples, (num_samples, ...), where no sample has to be read for them."""
    if isinstance(dataset, TensorDataset):
        return dataset.tensors[-1]
    try:
        return torch.as_tensor(dataset.targets)  # as torchvision's have them
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None


def modality_of(layout: Layout) -> Modality:
    """The modality that the names, shapes and types of the tensors suggest."""
    inputs, targets = dict(layout.inputs), layout.targets
    whole = inputs.get("")
    if whole is not None and whole == targets and whole.dtype == "int64" and len(whole.shape) == 1:
        return Modality.TOKENS
    if whole is not None and whole.dtype == "float32" and len(whole.shape) == 3 and targets == CLASS:
        return Modality.IMAGES
    ids = inputs.get(IDS)
    is_text = ids is not None and ids.dtype == "int64" and len(ids.shape) == 1
    if is_text and MASK in inputs and targets in (ids, inputs.get(DECODER_IDS)):
        return Modality.PAIRS if DECODER_IDS in inputs else Modality.MASKED_TOKENS
    return Modality.LABELLED_TOKENS if is_text and targets == CLASS else Modality.OTHER


def as_tensors(sample: Any) -> tuple[Any, Any]:
    """Inputs and targets of a sample. Raises Unfit when it is neither a pair nor a dictionary with a target."""
    if isinstance(sample, Mapping):
        target = next((name for name in TARGET_NAMES if name in sample), None)
        if target is None or len(sample) < 2:
            raise Unfit(
                f"a dictionary of {', '.join(map(str, sample))}: must hold one of {', '.join(TARGET_NAMES)} and inputs"
            )
        inputs, targets = {name: value for name, value in sample.items() if name != target}, sample[target]
    elif isinstance(sample, tuple | list) and len(sample) == 2:
        inputs, targets = sample
    else:
        raise Unfit(
            f"a {type(sample).__name__}: a sample must be a pair (inputs, target) or a dictionary with a target"
        )
    targets = as_tree(targets)
    if not isinstance(inputs, Mapping):
        return as_input(inputs), targets
    tensors = {str(name): as_input(value, f" under {name!r}") for name, value in inputs.items()}
    if IDS in tensors and MASK not in tensors and isinstance(targets, Tensor) and not targets.dim():
        tensors[MASK] = torch.ones_like(tensors[IDS])
    return tensors, targets


def as_tree(value: Any) -> Any:
    """The targets as a tensor, or as tensors in dictionaries and tuples. Raises Unfit like `as_tensor`."""
    if isinstance(value, Mapping) and value:
        return {str(name): as_tree(each) for name, each in value.items()}
    is_tuple = isinstance(value, tuple) or (isinstance(value, list) and not all(map(is_plain, value)))
    if is_tuple and value:
        return tuple(as_tree(each) for each in value)
    tensor = as_tensor(value, WIDER_TARGETS, " as a target")
    return tensor.long() if tensor.dtype is torch.bool and not tensor.dim() else tensor


def is_plain(value: Any) -> bool:
    """Whether torch.as_tensor makes one tensor of a list of such values."""
    return all(map(is_plain, value)) if isinstance(value, list) else isinstance(value, int | float | np.generic)


def as_input(value: Any, where: str = "") -> Tensor:
    """An input as a tensor. Images of bytes stay as they are; rows of bytes are tokens. Raises Unfit like
    `as_tensor`."""
    tensor = as_tensor(value, WIDER, where)
    return tensor.long() if tensor.dtype is torch.uint8 and tensor.dim() <= 1 else tensor


def as_tensor(value: Any, wider: Mapping[torch.dtype, torch.dtype], where: str) -> Tensor:
    """The value as a tensor of a type that models take. Raises Unfit for other values than arrays and numbers.

    Args:
        where: in the sample the value stands, for the message.
    """
    allowed = "tensors, arrays and numbers can be used, so leave it out or turn it into such"
    if not isinstance(value, Tensor | np.ndarray | np.generic | int | float | list):
        raise Unfit(f"made of a {type(value).__name__}{where}: {allowed}")
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:  # arrays of texts or objects, lists of several lengths
        raise Unfit(f"made of a {type(value).__name__}{where} ({first_line(error)}): {allowed}") from None
    return tensor.to(wider.get(tensor.dtype, tensor.dtype))


def layout_of(inputs: Any, targets: Any) -> Layout:
    return Layout(tree_of(inputs if isinstance(inputs, Mapping) else {"": inputs}), tree_of(targets))
