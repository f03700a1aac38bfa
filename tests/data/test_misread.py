"""data=external: samples in another convention are refused, since they would train something else without an error."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from lowvram.config.errors import BadInput
from lowvram.data.misread import are_copied, check_image
from lowvram.data.source import Unfit
from lowvram.data.spec import Modality
from lowvram.models.external import ExternalConfig
from lowvram.tasks import External as ExternalTask
from tests.data.test_external import opened


def tokens(draw: random.Random, length: int) -> torch.Tensor:
    return torch.tensor([draw.randrange(5, 50) for _ in range(length)])


def causal(ids: torch.Tensor, num_left_out: int) -> dict[str, torch.Tensor]:
    """As transformers' collator for causal models makes it: the model is expected to shift the labels."""
    labels = ids.clone()
    labels[:num_left_out] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def masked(draw: random.Random, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """As transformers' collator for masked models makes it: some of the chosen tokens stay as they are."""
    is_chosen = torch.tensor([draw.random() < 0.15 for _ in ids])
    is_chosen[draw.randrange(len(ids))] = True
    is_hidden = is_chosen & torch.tensor([draw.random() < 0.8 for _ in ids])
    hidden = ids.where(~is_hidden, 1)
    return {"input_ids": hidden, "attention_mask": torch.ones_like(ids), "labels": ids.where(is_chosen, -100)}


def test_labels_that_are_not_shifted_are_refused() -> None:
    draw = random.Random(20261127)
    for _ in range(12):
        length, num_samples = draw.randint(6, 20), draw.randint(4, 30)
        ids = [tokens(draw, length) for _ in range(num_samples)]
        source = {"input_ids": tokens(draw, 4), "attention_mask": torch.ones(4, dtype=torch.long)}
        for samples in (
            [causal(each, draw.choice([0, 0, 2, 3])) for each in ids],
            [(each, each.clone()) for each in ids],
            [(each.numpy().astype(np.int32), each.tolist()) for each in ids],
            [{**source, "decoder_input_ids": each, "labels": each} for each in ids],
        ):
            with pytest.raises(
                BadInput, match=r"data\.target=.* made of targets that are .* at the same places, so that"
            ):
                opened(samples, vocab_size=50)


def test_other_targets_are_taken() -> None:
    draw = random.Random(27112026)
    for _ in range(12):
        length, num_samples = draw.randint(6, 20), draw.randint(1, 30)
        ids = [tokens(draw, length + 1) for _ in range(num_samples)]
        kinds = {
            Modality.TOKENS: [(each[:-1], each[1:]) for each in ids],
            Modality.MASKED_TOKENS: [masked(draw, each) for each in ids],
            Modality.PAIRS: [{**causal(each, 0), "decoder_input_ids": each[:-1], "labels": each[1:]} for each in ids],
        }
        for modality, samples in kinds.items():
            assert opened(samples, vocab_size=50).spec.modality is modality
    ones: Any = [(torch.full((9,), token), torch.full((9,), token)) for token in (3, 4, 5)]
    assert opened(ones).spec.modality is Modality.TOKENS  # of one token, over and over: shifted or not
    assert not are_copied([(torch.arange(9), torch.tensor([-100, 1] + [-100] * 7))])


def test_images_whose_channels_are_last_are_refused() -> None:
    draw = random.Random(20261127)
    for _ in range(30):
        channels, sides = draw.choice([1, 3, 4]), (draw.randint(5, 300), draw.randint(5, 300))
        check_image((channels, *sides))
        with pytest.raises(Unfit, match=r"whose channels are last; .* image\.permute\(2, 0, 1\)"):
            check_image((*sides, channels))
    for shape in ((3, 2, 2), (3, 4, 4), (64, 4, 4), (512, 1, 1), (2, 9, 4), (16, 3, 3), (3, 9, 1), (12, 28, 28)):
        check_image(shape)
    image = np.zeros((12, 9, 3), np.float32)
    with pytest.raises(BadInput, match=r"data\.target=.*: an image of the shape \(12, 9, 3\), whose channels are last"):
        opened([(image, 1)] * 3)


def test_a_model_of_ones_own_may_read_its_own_convention() -> None:
    spec = opened([{"pixels": np.zeros((12, 9, 3), np.float32), "label": 1}] * 3).spec
    problem = ExternalTask("torch.nn.CrossEntropyLoss").pose(ExternalConfig("torch.nn.Identity"), spec)
    assert (problem.spec.modality, problem.spec.num_classes) == (Modality.OTHER, 2)
