"""What a model has to know of its data before it is built: modality, shapes, number of classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowvram.config.errors import BadInput
from lowvram.core.rig import IGNORE

IDS, MASK = "input_ids", "attention_mask"  # the inputs of all texts but those whose next token is predicted
DECODER_IDS = "decoder_input_ids"  # of pairs: the second text, one token late
POSITIONS = "position_ids"  # beside IDS where a row holds several sequences: each counts its tokens from 0


class Modality(Enum):
    """What a sample is."""

    TOKENS = "tokens"  # the next token is predicted
    LABELLED_TOKENS = "labelled tokens"  # padded to one length; each sample has a class
    MASKED_TOKENS = "masked tokens"  # some tokens are hidden, and predicted from the others
    PAIRS = "pairs of texts"  # the second is predicted from the first
    IMAGES = "images"  # each has a class
    OTHER = "other tensors"  # as the user's own data hold them


TEXTS = (Modality.TOKENS, Modality.LABELLED_TOKENS, Modality.MASKED_TOKENS, Modality.PAIRS)


@dataclass(frozen=True)
class TextRules:
    """What a model asks of texts.

    pad_id      the token that short texts are padded with; None: the tokenizer's (padding.py)
    end_id      the token that must end each text; None: none must
    tokenizer   where to look for the model's tokenizer: a folder, or a name on the hub; None: it has none
    revision    of the tokenizer on the hub
    start_id    the token that a decoder begins with; None: the last token of what it writes, as mBART's
    stop_ids    the tokens that end texts, as the model's configuration has them
    vocab_size  tokens that the model knows; None: as many as the data have
    is_trained  whether the model starts with weights that were trained on the tokens of its tokenizer

    is_pad_fixed           whether texts have to be padded with `pad_id`, whatever the tokenizer makes of texts
    finds_ends_by_padding  whether the model takes the last token that isn't `pad_id` for the end of a text
    class_names            of a trained head, in the order of its logits; None: there is none
    """

    pad_id: int | None = None
    end_id: int | None = None
    tokenizer: str | None = None
    revision: str | None = None
    start_id: int | None = 0
    is_trained: bool = False
    stop_ids: tuple[int, ...] = ()
    vocab_size: int | None = None
    is_pad_fixed: bool = False
    finds_ends_by_padding: bool = False
    class_names: tuple[str, ...] | None = None

    @property
    def padding(self) -> int:
        """The token that short texts are padded with; 0 where nobody has said, as masks tell what is padding."""
        return self.pad_id or 0

    def padded(self, tokens: np.ndarray, length: int) -> dict[str, Tensor]:
        """The inputs made of a text of (num_tokens,) integers: cut to `length`, ended and padded."""
        return self.filled(self.ended(tokens, length), length)

    def filled(self, tokens: np.ndarray, length: int) -> dict[str, Tensor]:
        """The inputs made of at most `length` tokens: padded."""
        ids = np.full(length, self.padding, np.int64)
        ids[: len(tokens)] = tokens
        return {IDS: torch.from_numpy(ids), MASK: (torch.arange(length) < len(tokens)).long()}

    def ended(self, tokens: np.ndarray, length: int) -> np.ndarray:
        """At most `length` tokens of a text, the last of them `end_id`, if there is one."""
        tokens = tokens[:length]
        if self.end_id is None or (len(tokens) and tokens[-1] == self.end_id):
            return tokens
        return np.append(tokens[: length - 1].astype(np.int64), self.end_id)

    def decoded(self, tokens: np.ndarray, length: int) -> tuple[Tensor, Tensor]:
        """The inputs and targets of a decoder that writes these (num_tokens,) integers, at most `length`: each token is
        predicted from those before it, the first from `start_id`. Padding is `padding` in inputs, IGNORE in targets."""
        num_tokens = len(tokens)
        inputs, targets = np.full(length, self.padding, np.int64), np.full(length, IGNORE, np.int64)
        inputs[0] = tokens[-1] if self.start_id is None else self.start_id
        inputs[1:num_tokens], targets[:num_tokens] = tokens[:-1], tokens
        return torch.from_numpy(inputs), torch.from_numpy(targets)


@dataclass(frozen=True)
class TensorLayout:
    """One tensor of a sample; `dtype` is torch's name for it, such as float32."""

    shape: tuple[int, ...]
    dtype: str

    def zeros(self, num_samples: int) -> Tensor:
        return torch.zeros((num_samples, *self.shape), dtype=getattr(torch, self.dtype))


# A tensor, or pairs of a key and a tree: of a dictionary, or of a tuple, whose keys are 0, 1, …
Tree = "TensorLayout | tuple[tuple[str | int, Tree], ...]"


def tree_of(value: Any) -> Any:
    """The `Tree` of a tensor, or of tensors in dictionaries and tuples."""
    if isinstance(value, Tensor):
        return TensorLayout(tuple(value.shape), str(value.dtype).removeprefix("torch."))
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    return tuple((key, tree_of(each)) for key, each in items)


def zeros_like_tree(tree: Any, num_samples: int) -> Any:
    """The tensors of `num_samples` samples, all zero."""
    if isinstance(tree, TensorLayout):
        return tree.zeros(num_samples)
    values = {key: zeros_like_tree(each, num_samples) for key, each in tree}
    return tuple(values.values()) if 0 in values else values


@dataclass(frozen=True)
class Layout:
    """All tensors of a sample. A single input tensor has the name ""."""

    inputs: tuple[tuple[str, TensorLayout], ...]
    targets: Any  # a Tree

    def example(self, num_samples: int, is_padded: bool) -> tuple[Any, Any]:
        """Inputs and targets with the shapes of `num_samples` samples, all zero, with a mask of `mask_like`."""
        tensors = {name: tensor.zeros(num_samples) for name, tensor in self.inputs}
        if MASK in tensors:
            tensors[MASK] = mask_like(tensors[MASK], is_padded)
        return tensors.get("", tensors), zeros_like_tree(self.targets, num_samples)


def mask_like(tensor: Tensor, is_padded: bool) -> Tensor:
    """A mask (1: real token) of rows without padding or, if `is_padded`, with the last token as padding."""
    mask = torch.ones_like(tensor)
    if is_padded and mask.dim() > 1:
        mask[..., -1] = 0
    return mask


def layout_from(plain: Mapping[str, Any]) -> Layout:
    """The inverse of dataclasses.asdict, also after a round trip through JSON."""
    return Layout(tree_from(plain["inputs"]), tree_from(plain["targets"]))


def tree_from(plain: Any) -> Any:
    if isinstance(plain, Mapping):
        return TensorLayout(tuple(plain["shape"]), plain["dtype"])
    return tuple((key, tree_from(each)) for key, each in plain)


def described(layout: Layout) -> str:
    """A layout for messages, such as "float32 (3, 8, 8) with int64 ()"."""
    return f"{', '.join(described_tree(layout.inputs))} with {', '.join(described_tree(layout.targets))}"


def described_tree(tree: Any, name: str = "") -> Iterator[str]:
    if isinstance(tree, TensorLayout):
        yield f"{name} {tree.dtype} {tree.shape}".strip()
        return
    for key, each in tree:
        yield from described_tree(each, f"{name}.{key}".strip("."))


FEW_SHAPES = 16  # of batches: up to this many, a graph is compiled for each


@dataclass(frozen=True)
class DataSpec:
    """The shape of one sample's inputs, and how many classes its targets have.

    modality     TOKENS, MASKED_TOKENS, PAIRS  LABELLED_TOKENS      IMAGES                     OTHER
    num_classes  size of the vocabulary        classes              classes                    classes, or 0
    shape        (sequence_length,)            (sequence_length,)   (channels, height, width)  of the first input
    vocab_size   None: as num_classes          size of the vocab.   None                       None
    layout       None, unless a sample has other tensors than its modality says; of PAIRS see `pairs_layout`

    has_few_shapes: whether batches of equally many samples have at most `FEW_SHAPES` different shapes.
    is_padded: whether masks of samples may have zeros. If not, models can attend without a mask.
    class_names: of each class, where the data know them.
    pad_id: the token that pads texts with a class; None: not known.
    These two don't define a problem, so specs are equal without them.
    """

    modality: Modality
    num_classes: int
    shape: tuple[int, ...]
    vocab_size: int | None = None
    layout: Layout | None = None
    has_few_shapes: bool = True
    is_padded: bool = True
    class_names: tuple[str, ...] | None = field(default=None, compare=False, repr=False)
    pad_id: int | None = field(default=None, compare=False, repr=False)

    @property
    def num_tokens(self) -> int:
        """Size of the vocabulary, of tokens."""
        return self.num_classes if self.vocab_size is None else self.vocab_size

    @property
    def has_several_targets(self) -> bool:
        return self.layout is not None and not isinstance(self.layout.targets, TensorLayout)

    def check_modality(self, wanted: Modality) -> None:
        """Raises BadInput if these data are of another kind than the one that a model reads."""
        if self.modality is not wanted:
            allowed = f"a source of {wanted.value} for this model: data=auto follows the model"
            raise BadInput("data", self.modality.value, allowed)

    def example(self, num_samples: int) -> tuple[Any, Any]:
        """Inputs and targets with the shapes of `num_samples` samples, all zero, with a mask of `mask_like`."""
        if self.layout is not None:
            return self.layout.example(num_samples, self.is_padded)
        shape = (num_samples, *self.shape)
        label = TensorLayout((), "int64")
        if self.modality is Modality.IMAGES:
            return torch.zeros(shape), label.zeros(num_samples)
        tokens = torch.zeros(shape, dtype=torch.long)
        if self.modality is Modality.TOKENS:
            return tokens, torch.zeros_like(tokens)
        inputs = {IDS: tokens, MASK: mask_like(tokens, self.is_padded)}
        is_masked = self.modality is Modality.MASKED_TOKENS
        return inputs, torch.zeros_like(tokens) if is_masked else label.zeros(num_samples)


def pairs_layout(source_length: int, target_length: int) -> Layout:
    """All tensors of a pair of texts."""
    source, target = TensorLayout((source_length,), "int64"), TensorLayout((target_length,), "int64")
    return Layout(((IDS, source), (MASK, source), (DECODER_IDS, target)), target)


def num_real_tokens(inputs: Any, targets: Tensor) -> Tensor:
    """The number of tokens without padding (0-dim), of pairs those of both texts."""
    if not (isinstance(inputs, Mapping) and MASK in inputs):
        return real_lengths(inputs, targets).sum()
    num_tokens = inputs[MASK].sum()
    return num_tokens + (targets != IGNORE).sum() if DECODER_IDS in inputs else num_tokens


def real_lengths(inputs: Any, targets: Tensor) -> Tensor:
    """Number of tokens of each row up to its last real one, 1 or more, (rows,) int64. A token is real if its mask isn't
    0 or, without a mask, if it has a target.

    Args:
        inputs: (rows, length), or tensors by name with a mask or several sequences in a row.
        targets: (rows, length), where there is no mask.
    """
    is_masked = isinstance(inputs, Mapping) and MASK in inputs
    is_real = inputs[MASK] != 0 if is_masked else targets != IGNORE
    places = torch.arange(1, is_real.shape[-1] + 1, device=is_real.device)
    return (is_real * places).amax(-1).clamp(min=1)


def num_places(inputs: Any) -> int:
    """Number of tokens, padding included."""
    if not isinstance(inputs, Mapping):
        return inputs.numel()
    return sum(inputs[name].numel() for name in (IDS, DECODER_IDS) if name in inputs)
