"""data=hub: texts, texts with a class, or images from Hugging Face's hub or from local files of the same formats.

Shapes: s side of the image in pixels, always square.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, final

import numpy as np
import torch
from torch import Tensor

from lowvram.config.errors import BadInput, require
from lowvram.data.columns import flat_lists
from lowvram.data.documents import Unit, as_documents
from lowvram.data.image_checks import HINT, Check, faults_of
from lowvram.data.image_rules import ImageRules, image_rules_of
from lowvram.data.imagefolder import Crop, CroppedImages, RandomCrop, center_crop, held_out_tenth
from lowvram.data.masking import MASKED_SHARE, masked_source
from lowvram.data.numbering import numbered
from lowvram.data.padding import tokenizer_and_rules
from lowvram.data.source import (
    Data,
    FollowedModel,
    ImageSource,
    ResolvedImageSource,
    ResolvedTextSource,
    Source,
    Texts,
    check_modality,
    require_count,
    resolved_size,
)
from lowvram.data.spec import DataSpec, Modality, TextRules
from lowvram.data.splits import SplitSource, SplitTextSource, evenly_spaced, num_before_tenth, read_splits
from lowvram.data.stored_images import StoredImages, image_column
from lowvram.data.text_and_label import (
    class_names,
    class_numbers,
    column_documents,
    marked_tokens,
    stream_tokens,
)
from lowvram.data.tokenizer import Tokenizer
from lowvram.data.windows import TokenStream, windowed


@final
@dataclass(frozen=True)
class Hub(SplitTextSource, ImageSource):
    """With `image` and `label`: images to classify. With `label` alone: texts to classify. With neither: the next token
    of the texts is predicted, or for a masked language model some hidden ones.

    Raises:
        BadInput: a value out of range; no such data set, split or column, or no network; a label without a class.
    """

    modalities: ClassVar[tuple[Modality, ...]] = (
        Modality.TOKENS,
        Modality.LABELLED_TOKENS,
        Modality.MASKED_TOKENS,
        Modality.IMAGES,
    )
    only_with: ClassVar[Mapping[Modality, str]] = {
        Modality.LABELLED_TOKENS: "data.label",
        Modality.IMAGES: "data.image",
    }

    text: str | None = None
    label: str | None = None
    image: str | None = None
    samples: Unit = Unit.windows
    masked_share: float = MASKED_SHARE
    tokenizer: str = "auto"
    sequence_length: int | None = None
    image_size: int | None = None
    min_area: float = 0.35
    flip: bool = True
    check: Check = Check.headers
    skip_unreadable: bool = False
    streaming: bool = False
    buffer_samples: int = 10_000
    eval_samples: int = 256

    def __post_init__(self) -> None:
        for name in ("sequence_length", "image_size"):
            require_count(f"data.{name}", getattr(self, name))
        for name in ("buffer_samples", "eval_samples"):
            require(getattr(self, name) >= 1, f"data.{name}", getattr(self, name), "at least 1")
        require(0 < self.masked_share < 1, "data.masked_share", self.masked_share, "more than 0 and less than 1")
        require(0 < self.min_area <= 1, "data.min_area", self.min_area, "more than 0 and at most 1")
        require(self.image is None or self.text is None, "data.text", self.text, "null where data.image is given")
        allowed = "windows where data.label is given: each text is then a sample anyway"
        is_free = self.label is None or self.samples is Unit.windows
        require(is_free, "data.samples", self.samples.name, allowed)
        labelled = self.image is None or self.label is not None
        require(labelled, "data.label", self.label, "the column of the images' classes")

    @property
    def modality(self) -> Modality:
        if self.image is not None:
            return Modality.IMAGES
        return Modality.TOKENS if self.label is None else Modality.LABELLED_TOKENS

    @property
    def place(self) -> SplitSource:
        return replace(super().place, buffer_samples=self.buffer_samples if self.streaming else None)

    def resolve(self, model: FollowedModel) -> Source:
        can_be = (self.modality, Modality.MASKED_TOKENS) if self.modality is Modality.TOKENS else (self.modality,)
        check_modality("hub", can_be, model)
        size = model.reading(self.modality).natural_shape()[-1]
        sizes = {"sequence_length": self.sequence_length or size, "image_size": self.image_size or size}
        resolved = replace(self, **sizes)
        if self.modality is Modality.IMAGES:
            return ResolvedImageSource(resolved, image_rules_of(model))
        return masked_source(resolved, model) or ResolvedTextSource(resolved, model.text_rules)

    def read(self, rules: TextRules, seed: int) -> Data:
        if self.modality is Modality.IMAGES:
            return self.read_images(ImageRules(), seed)
        if self.modality is Modality.TOKENS:
            return self.tokens(*tokenizer_and_rules(self.tokenizer, rules), seed)
        split = split_by_class(self, rules.class_names, *read_splits(self.place, self.eval_samples))
        return self.texts(split, *tokenizer_and_rules(self.tokenizer, rules))

    def tokens(self, tokenizer: Tokenizer, rules: TextRules, seed: int) -> Data:
        """The texts as samples of tokens."""
        columns = self.ended_texts(*read_splits(self.place, self.eval_samples), tokenizer)
        if self.samples is Unit.documents:
            return self.documents(columns, tokenizer, rules)
        return self.stream(columns, tokenizer, seed)

    def ended_texts(self, train: Any, held_out: Any | None, tokenizer: Tokenizer) -> tuple[Any, Any]:
        """The tokens of all texts to train on and of those held out, as Arrow columns of lists."""
        column = stream_tokens(train, self.text, tokenizer)
        if held_out is not None:
            return column, stream_tokens(held_out, self.text, tokenizer)
        num_train = num_before_tenth(len(column))
        return column.slice(0, num_train), column.slice(num_train)

    def documents(self, columns: tuple[Any, Any], tokenizer: Tokenizer, rules: TextRules) -> Data:
        """A sample holds tokens of one text only; each token is predicted."""
        length = resolved_size("data.sequence_length", self.sequence_length)
        trained_on, evaluated = (
            column_documents(column, tokenizer, length, rules.padding, limit)
            for column, limit in zip(columns, (None, self.eval_samples), strict=True)
        )
        allowed = "a data set with texts to train on and others that are held out"
        require(min(len(trained_on), len(evaluated)) > 0, "data.name", self.name, allowed)
        return as_documents(trained_on, evaluated, tokenizer, f"texts of {self.name}")

    def stream(self, columns: tuple[Any, Any], tokenizer: Tokenizer, seed: int) -> Data:
        """All texts joined, read in windows."""
        length = resolved_size("data.sequence_length", self.sequence_length)
        trained_on, evaluated = (TokenStream(list(flat_lists(column))) for column in columns)
        allowed = (
            f"longer: it has {len(trained_on)} {tokenizer.unit} to train on and {len(evaluated)} held out, and one"
            f" sample takes {length + 1} of each (data.sequence_length={length})"
        )
        require(min(len(trained_on), len(evaluated)) > length, "data.name", self.name, allowed)
        return windowed(trained_on, evaluated, tokenizer, length, self.eval_samples, seed, f"texts of {self.name}")

    def texts(self, split: TrainEvalSplit, tokenizer: Tokenizer, rules: TextRules) -> Data:
        """Each text is a sample with a class."""
        length = resolved_size("data.sequence_length", self.sequence_length)
        train, held_out = (
            LabelledTexts(marked_tokens(each.dataset, self.text, self.label, tokenizer, length), each, length, rules)
            for each in (split.train, split.held_out.only(self.eval_samples))
        )
        modality, names = Modality.LABELLED_TOKENS, split.class_names
        spec = DataSpec(modality, len(names), (length,), tokenizer.vocab_size, class_names=names, pad_id=rules.pad_id)
        what = f"texts of up to {length} {tokenizer.unit}"
        return Data(spec, train, held_out, self.described(what, split, len(train), len(held_out)))

    def read_images(self, rules: ImageRules, seed: int) -> Data:
        """Each image is a sample with a class."""
        split = split_by_class(self, rules.class_names, *read_splits(self.place, self.eval_samples))
        size, name = resolved_size("data.image_size", self.image_size), str(self.image)
        crops = RandomCrop(self.min_area, self.flip, seed), center_crop
        train, held_out = (
            self.cropped(
                StoredImages(image_column(each.dataset, name), each.labels, self.root), each.indices, size, crop, rules
            )
            for each, crop in zip((split.train, split.held_out.only(self.eval_samples)), crops, strict=True)
        )
        names = split.class_names
        spec = DataSpec(Modality.IMAGES, len(names), (3, size, size), class_names=names)
        num_skipped = len(split.train.indices) + min(self.eval_samples, len(split.held_out.indices))
        num_skipped -= len(train) + len(held_out)
        skipped = f"; images that can't be read are skipped: {num_skipped}" if num_skipped else ""
        what = f"images, {size}x{size} pixels"
        return Data(spec, train, held_out, self.described(what, split, len(train), len(held_out)) + skipped)

    def cropped(
        self, stored: StoredImages, rows: np.ndarray, size: int, crop: Crop, rules: ImageRules
    ) -> CroppedImages:
        """The images of these rows that can be read. Raises BadInput for one that can't, unless such are skipped."""
        faults = faults_of(rows.tolist(), stored.file, size, self.check)
        first = next((place for place, fault in enumerate(faults) if fault is not None), None)
        if first is not None and not self.skip_unreadable:
            allowed = f"a column of images: the one in row {rows[first]} can't be read ({faults[first]}): {HINT}"
            raise BadInput("data.image", self.image, allowed)
        kept = rows[np.array([fault is None for fault in faults], bool)]
        require(len(kept) > 0, "data.image", self.image, "a column with images to train on, and others held out")
        return CroppedImages(stored, kept, size, crop, rules)

    @property
    def root(self) -> Path:
        """The folder that paths of images are relative to."""
        path = self.place.path
        return path if path.is_dir() else path.parent

    def described(self, what: str, split: TrainEvalSplit, num_train: int, num_eval: int) -> str:
        return f"{self.name}: {what}, {split.num_classes} classes, {num_train} to train on, {num_eval} held out"


@final
@dataclass(frozen=True)
class LabelledRows:
    """Some rows of a data set, and the classes of all its rows."""

    dataset: Any
    labels: np.ndarray  # (num_rows of the data set,) int64
    indices: np.ndarray  # of the selected rows

    def only(self, limit: int) -> LabelledRows:
        """At most `limit` of the rows, evenly spaced."""
        return replace(self, indices=evenly_spaced(self.indices, limit))


@final
@dataclass(frozen=True)
class TrainEvalSplit:
    """The rows to train on, the rows held out, and their classes."""

    train: LabelledRows
    held_out: LabelledRows
    class_names: tuple[str, ...]  # by number
    num_classes: int  # of these that the data have


def split_by_class(source: Hub, of_head: tuple[str, ...] | None, train: Any, held_out: Any | None) -> TrainEvalSplit:
    """The samples with their classes. Where the data set has no held-out split, a tenth of each class is held out.

    Args:
        of_head: the names of the classes of the model's trained head, which number the data's.
    """
    label = str(source.label)
    classes = class_names(train, label)
    names, numbers = numbered(classes, of_head)
    labels = numbers[class_numbers(train, label, classes, source.train_split)]
    if held_out is not None:
        others = numbers[class_numbers(held_out, label, classes, "the held-out split")]
        return TrainEvalSplit(
            LabelledRows(train, labels, np.arange(len(labels))),
            LabelledRows(held_out, others, np.arange(len(others))),
            names,
            len(classes),
        )
    is_held = held_out_tenth([str(row) for row in range(len(labels))], labels)
    allowed = "a data set in which a class has at least 2 samples, so that one can be held out"
    require(bool(is_held.any()), "data.name", source.name, allowed)
    return TrainEvalSplit(
        LabelledRows(train, labels, np.flatnonzero(~is_held)),
        LabelledRows(train, labels, np.flatnonzero(is_held)),
        names,
        len(classes),
    )


@final
class LabelledTexts(Texts):
    """Texts with a class, whose tokens are an Arrow column of lists."""

    def __init__(self, tokens: Any, rows: LabelledRows, length: int, rules: TextRules) -> None:
        self.tokens, self.rows, self.padded_length, self.rules = tokens, rows, length, rules

    def __len__(self) -> int:
        return len(self.rows.indices)

    def length(self, index: int, epoch: int) -> int:
        row = int(self.rows.indices[index])
        return max(
            1,
            len(self.rules.ended(self.tokens[row].values.to_numpy(), self.padded_length)),
        )

    def sample(self, index: int, epoch: int) -> tuple[dict[str, Tensor], Tensor]:
        row = int(self.rows.indices[index])
        inputs = self.rules.padded(self.tokens[row].values.to_numpy(), self.padded_length)
        return inputs, torch.tensor(int(self.rows.labels[row]))
