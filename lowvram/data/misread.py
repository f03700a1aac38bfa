"""Samples of a user's data set in a convention other than ours, which would be trained on without an error."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from lowvram.core.rig import IGNORE
from lowvram.data.source import Unfit
from lowvram.data.spec import DECODER_IDS, IDS, Modality

CHANNELS = (1, 3, 4)  # of images: grey, colours, colours and transparency
FEW_TARGETS = 8  # fewer of these may equal the inputs by chance, as some of the masked tokens stay as they are
NAMED = (
    "; for a model of your own that takes them so, return a dictionary with the name of its argument instead, and set"
    " task=external task.target=torch.nn.CrossEntropyLoss"
)
PREDICTED: dict[Modality, tuple[str | None, str]] = {  # what targets are predicted from, and how to mend it
    Modality.TOKENS: (None, "return tokens[:-1] as inputs and tokens[1:] as targets"),
    Modality.MASKED_TOKENS: (
        IDS,
        f"to predict the next token, shift them (labels[i] = {IDS}[i + 1], the last one -100); to predict masked ones,"
        f" hide these in {IDS} and set all other labels to -100",
    ),
    Modality.PAIRS: (DECODER_IDS, f"shift {DECODER_IDS}, so that each label follows the tokens that it is told from"),
}


def check_targets(modality: Modality, samples: Iterable[tuple[Any, Any]]) -> None:
    """Raises Unfit if the targets of the first samples are the inputs at the same places, as where a model is meant to
    shift them by itself: ours don't, and would learn to copy."""
    if modality in PREDICTED:
        name, hint = PREDICTED[modality]
        pairs = ((inputs if name is None else inputs[name], targets) for inputs, targets in samples)
        if are_copied(pairs):
            shown = "the inputs" if name is None else name
            raise Unfit(f"made of targets that are {shown} at the same places, so that a model learns to copy: {hint}")


def are_copied(pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
    """Whether all targets that count equal the inputs (both (length,)), and it isn't by chance. Of shifted targets only
    those of one token, over and over, do."""
    num_equal, is_whole, is_varied = 0, True, False
    for inputs, targets in pairs:
        is_counted = targets != IGNORE
        if inputs.shape != targets.shape or bool((inputs != targets)[is_counted].any()):
            return False
        num_equal += int(is_counted.sum())
        is_whole, is_varied = is_whole and bool(is_counted.all()), is_varied or len(inputs[is_counted].unique()) > 1
    return is_varied and (is_whole or num_equal >= FEW_TARGETS)


def check_image(shape: tuple[int, ...]) -> None:
    """Raises Unfit for the shape of an image whose channels come last."""
    first, middle, last = shape
    if last in CHANNELS and first not in CHANNELS and last < min(first, middle):
        allowed = f"an image of the shape {shape}, whose channels are last; channels, height, width are read: return"
        raise Unfit(f"{allowed} image.permute(2, 0, 1) of a tensor, image.transpose(2, 0, 1) of an array{NAMED}")
