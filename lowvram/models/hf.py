"""model=hf: the models of Hugging Face's transformers, from a local folder or the hub."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from omegaconf import MISSING
from torch import nn

from lowvram.config.errors import BadInput, require
from lowvram.data.image_rules import ImageRules
from lowvram.data.spec import DataSpec, Modality, TextRules
from lowvram.models import hf_layout
from lowvram.models.hf_heads import (
    READS,
    WRAPPING_KINDS,
    Head,
    check_classes,
    check_shift,
    class_names_of,
    finish_classifier,
    head_named_by,
    is_decoder_alone,
    model_class,
    own_pad_id,
    stop_ids,
)
from lowvram.models.hf_packed import PACKED_KINDS
from lowvram.models.hf_pixels import processing_of, write_size
from lowvram.models.hf_remade import HfRemade
from lowvram.models.hf_sizes import check_texts, check_windows, num_positions, shapes_of
from lowvram.models.hf_source import (
    check_quantization,
    check_weights,
    folder,
    is_folder,
    local_files,
    other_weights,
    read_config,
    transformers,
    weight_files,
)
from lowvram.models.hf_ties import names_apart, part, refusal, says_apart, tell_apart
from lowvram.models.hf_weights import (
    Missing,
    Place,
    Weights,
    check_complete,
    check_index,
    of_new_head,
    start_new_head,
)

LONGEST = 1024  # tokens of a sample, unless the data or the model need fewer
USUAL_SIZE = (224, 224)  # pixels, for models that accept any size


@final
@dataclass(frozen=True)
class HfConfig(HfRemade):
    """A model of transformers, with changes to its configuration.

    Raises:
        BadInput: a value out of range; it names `model.<field>`.
    """

    name: str = MISSING
    revision: str | None = None
    weights: Weights = Weights.auto
    missing: Missing = Missing.refuse
    head: Head = Head.auto
    reset_head: bool = False
    args: dict[str, Any] | None = None
    dropout: float | None = 0.0
    blocks: str | None = None

    def __post_init__(self) -> None:
        allowed = "null (as the model's own configuration says), or at least 0 and less than 1"
        require(self.dropout is None or 0 <= self.dropout < 1, "model.dropout", self.dropout, allowed)
        known = read_config(self.name, self.revision).to_dict()
        for name, value in (self.args or {}).items():
            require(name in known, f"model.args.{name}", value, f"removed: this model knows {', '.join(sorted(known))}")
        if self.is_pretrained() and is_folder(self.name):
            check_weights(self.name)
            check_index(self.name, folder(self.name))
        if self.is_pretrained():
            check_quantization(self.name, known.get("quantization_config"))

    @property
    def description(self) -> str:
        apart = f" apart: {', '.join(self.names_apart())}" if self.names_apart() else ""
        return f"{self!r} {self.config().to_json_string()}{apart} transformers {transformers.__version__}"

    @property
    def modality(self) -> Modality:
        return READS[self.chosen_head()]

    @property
    def vocab_size(self) -> int | None:
        """The size of the model's vocabulary; None: not known."""
        return getattr(self.config().get_text_config(), "vocab_size", None)

    @property
    def num_classes(self) -> int | None:
        """The classes of a trained head; None if the head starts anew."""
        return self.config().num_labels if self.has_trained_head() else None

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The names of a trained head's classes, in the order of its logits; None if the head starts anew."""
        return class_names_of(self.config()) if self.has_trained_head() else None

    @property
    def end_id(self) -> int | None:
        """The token that must end each text; None if the model doesn't need one."""
        config = self.config()
        return next(iter(stop_ids(config)), None) if config.is_encoder_decoder else None

    @property
    def start_id(self) -> int | None:
        """The token that the decoder begins with; None for mBART and its like: the last token of the target."""
        config = self.config()
        return None if config.model_type in WRAPPING_KINDS else getattr(config, "decoder_start_token_id", None) or 0

    @property
    def text_rules(self) -> TextRules:
        """What the model requires of texts."""
        config, is_typed = self.config(), "pad_token_id" in (self.args or {})
        return TextRules(
            own_pad_id(config),
            self.end_id,
            self.name,
            self.revision,
            self.start_id,
            self.is_pretrained(),
            stop_ids(config),
            self.vocab_size,
            is_pad_fixed=is_typed or not is_decoder_alone(config),
            finds_ends_by_padding=self.modality is Modality.LABELLED_TOKENS and is_decoder_alone(config),
            class_names=self.class_names,
        )

    @property
    def image_rules(self) -> ImageRules:
        """What the model requires of images."""
        return ImageRules(processing_of(self.name, self.revision).scale, self.class_names)

    def reading(self, modality: Modality) -> HfConfig:
        """This configuration, as its head fixes the kind of data."""
        return self

    def natural_shape(self) -> tuple[int, ...]:
        """The shape of a sample when the data does not say."""
        config = self.config()
        if self.modality is Modality.IMAGES:
            size = getattr(config, "image_size", None) or processing_of(self.name, self.revision).image_size
            height, width = (size, size) if isinstance(size, int) else size or USUAL_SIZE
            return (getattr(config, "num_channels", 3), height, width)
        return (min(LONGEST, self.longest() or LONGEST),)

    def longest(self) -> int | None:
        """The most tokens for which the model has positions; None: not known."""
        return num_positions(self.config().get_text_config())

    def config(self) -> Any:
        """The model's own configuration with the changes of `model.args` and of `forced`."""
        config = deepcopy(read_config(self.name, self.revision))
        vars(config).pop("quantization_config", None)  # of the files: what is trained and saved here isn't quantized
        for name, value in {**(self.args or {}), **self.forced(config.to_dict())}.items():
            setattr(config, name, value)
        texts = config.get_text_config()
        if getattr(texts, "pad_token_id", None) is not None and own_pad_id(config) is None:
            texts.pad_token_id = None  # -1, or beyond the vocabulary: no token pads
        return config

    def forced(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The entries of a configuration that are changed only for the training, and not when the model is saved."""
        dropped = {name for name, value in values.items() if "drop" in name and isinstance(value, float)}
        cached = {"use_cache": False} if "use_cache" in values else {}
        return cached | ({} if self.dropout is None else dict.fromkeys(dropped, self.dropout))

    def chosen_head(self) -> Head:
        return head_named_by(self.config()) if self.head is Head.auto else self.head

    def model_class(self) -> Any:
        """The model's class in transformers."""
        return model_class(self.chosen_head(), self.config())

    def check_packed(self) -> None:
        """Raises BadInput unless this model_type is known to keep packed sequences apart: positions that restart at 0
        tell most models of transformers, but not all, where a sequence begins."""
        kind = self.config().model_type
        allowed = f"bucketed for a model of the kind {kind}: only {', '.join(sorted(PACKED_KINDS))} are known"
        require(kind in PACKED_KINDS, "loader", "packed", f"{allowed} to keep sequences of one row apart")

    def has_trained_head(self) -> bool:
        """Whether the pretrained weights include this head."""
        saved = self.config().architectures or []
        return self.is_pretrained() and not self.reset_head and self.model_class().__name__ in saved

    def is_pretrained(self) -> bool:
        if self.weights is Weights.auto:
            return not is_folder(self.name) or bool(weight_files(self.name) or other_weights(self.name))
        return self.weights is Weights.pretrained

    def config_for(self, spec: DataSpec) -> Any:
        """The configuration for these data.

        Raises:
            BadInput: the data are of another kind, or exceed the model's sizes.
        """
        config, is_image = self.config(), spec.modality is Modality.IMAGES
        if spec.modality is not self.modality:
            allowed = f"a source of {self.modality.value} for model.head={self.chosen_head().name}"
            raise BadInput("data", spec.modality.value, allowed)
        if is_image:
            self.fit_images(config, spec)
        else:
            check_texts(spec, self.longest(), self.vocab_size)
        if spec.modality in (Modality.LABELLED_TOKENS, Modality.IMAGES):
            check_classes(self.class_names, spec)
            config.num_labels = self.num_classes or spec.num_classes
        return config

    def fit_images(self, config: Any, spec: DataSpec) -> None:
        """Set the image size to that of the data.

        Raises:
            BadInput: the weights were trained for another size or number of channels.
        """
        channels, *size = self.natural_shape()
        require(spec.shape[0] == channels, "the images' channels", spec.shape[0], f"{channels}, which the model reads")
        check_windows(config, spec.shape[-1])
        if getattr(config, "image_size", None) is None or list(spec.shape[1:]) == size:
            return
        before = shapes_of(self.model_class(), config) if self.is_pretrained() else {}
        config.image_size = spec.shape[-1]
        is_fit = not before or before == shapes_of(self.model_class(), config)
        require(is_fit, "data.image_size", spec.shape[-1], f"{size[0]}, for which the weights were trained")

    def make(self, spec: DataSpec) -> nn.Module:
        model = self.model_class()(self.config_for(spec))
        part(model, self.names_apart())
        if spec.modality is Modality.LABELLED_TOKENS:
            finish_classifier(model, spec, self.text_rules)
        if spec.modality is Modality.PAIRS:
            check_shift(model, self.text_rules)
        return model

    def build(self, spec: DataSpec) -> nn.Module:
        if not self.is_pretrained():
            return self.make(spec)
        config, quantization = self.config_for(spec), getattr(self.saved_config(), "quantization_config", None)
        if quantization is not None:
            config.quantization_config = {**quantization, "dequantize": True}
        model, differences = Place(self.name, self.revision).read(self.model_class(), config, torch.float32)
        at_random = [*differences.missing, *differences.other_shape]
        new = set() if self.has_trained_head() else of_new_head(at_random, model, self.config())
        check_complete(self.name, differences, new, self.missing)
        tell_apart(self.name, self.names_apart())
        if self.reset_head:
            start_new_head(self.name, model)
        return model

    def names_apart(self) -> tuple[str, ...]:
        """The weights that the configuration ties to others, and that have values of their own in the files."""
        files = Place(self.name, self.revision).files() if self.is_pretrained() else []
        return names_apart(files, self.model_class(), self.config())

    def untied(self, first: str, other: str) -> BadInput:
        return refusal(self.name, first, other)

    def saved_config(self) -> Any:
        """The model's own configuration, as it was saved."""
        return read_config(self.name, self.revision)

    @property
    def base(self) -> str | None:
        if not self.is_pretrained():
            return None
        return str(folder(self.name).resolve()) if is_folder(self.name) else self.name

    def trained_folder(self) -> Path | None:
        return local_files(self.name, self.revision) if self.is_pretrained() else None

    def weight_files(self) -> list[Path]:
        folder = self.trained_folder()
        return hf_layout.weight_files(folder) if folder else []

    def written_in(self, folder: Path) -> HfConfig:
        return replace(self, name=str(folder), revision=None, weights=Weights.auto, args=None)

    def changes(self, new: Any) -> str:
        before = self.config().to_dict()
        return " ".join(f"{name}={value}" for name, value in (new.args or {}).items() if value != before[name])

    def with_sizes(self, sizes: Mapping[str, int]) -> HfConfig:
        """The same with other values in its configuration."""
        return replace(self, args={**(self.args or {}), **sizes})

    def save(self, model: Any, spec: DataSpec, folder: Path) -> None:
        """Save in transformers' own layout, with the files of the model's folder that belong to it."""
        unchanged = read_config(self.name, self.revision).to_dict()
        entries = {name: unchanged[name] for name in self.forced(unchanged)}
        if spec.class_names is not None and len(spec.class_names) == model.config.num_labels:
            entries["id2label"] = dict(enumerate(spec.class_names))
            entries["label2id"] = {name: number for number, name in enumerate(spec.class_names)}
        if self.names_apart() and says_apart(model, model.config):
            entries["tie_word_embeddings"] = False
        hf_layout.save(model, entries, folder)
        self.save_companions(folder)
        if spec.modality is Modality.IMAGES:
            write_size(folder, spec.shape[-1])

    def save_companions(self, folder: Path) -> None:
        """Copy the files that belong to the model and hold no weights, such as the tokenizer's."""
        hf_layout.copy_companions(local_files(self.name, self.revision), folder)
