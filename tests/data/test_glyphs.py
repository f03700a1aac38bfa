from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lowvram.data.glyphs import CHARACTERS, Glyphs, draw, mask


def images(source: Glyphs, seed: int = 0, epoch: int = 0, held_out: bool = False) -> Tensor:
    """The first ten images of an epoch."""
    data = source.open(seed)
    samples = data.eval if held_out else data.train
    return torch.stack([samples.sample(index, epoch)[0] for index in range(10)])


SMALL = Glyphs(image_size=16, num_samples=100, eval_samples=50)


def test_spec(image_model) -> None:
    data = Glyphs().resolve(image_model()).open(seed=0)
    image, label = data.train.sample(1, epoch=0)
    assert data.spec.shape == tuple(image.shape) == (3, 24, 24)
    assert data.spec.num_classes == len(CHARACTERS) == len(set(CHARACTERS)) >= 36
    assert (image.dtype, label.dtype, label.shape) == (torch.float32, torch.int64, ())
    assert (len(data.train), len(data.eval)) == (50_000, 256)


def test_values_have_about_mean_0_and_variance_1() -> None:
    drawn = images(Glyphs(image_size=32))
    assert abs(drawn.mean()) < 0.3
    assert 0.7 < drawn.std() < 1.3


def test_a_sample_is_pure_in_seed_epoch_and_index() -> None:
    assert torch.equal(images(SMALL), images(SMALL))
    assert not torch.equal(images(SMALL), images(SMALL, seed=1))
    assert not torch.equal(images(SMALL)[0], images(SMALL)[1])


def test_an_epoch_draws_anew_but_keeps_the_class() -> None:
    train = SMALL.open(seed=0).train
    (first, label), (second, same_label) = train.sample(4, epoch=0), train.sample(4, epoch=1)
    assert not torch.equal(first, second)
    assert label == same_label


def test_eval_shares_no_image_with_train() -> None:
    assert not torch.isclose(images(SMALL), images(SMALL, held_out=True)).all(dim=(1, 2, 3)).any()


def test_classes_are_balanced() -> None:
    train = SMALL.open(seed=0).train
    counts = Counter(int(train.sample(index, 0)[1]) for index in range(len(train)))
    assert set(counts) == set(range(len(CHARACTERS)))
    assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize("size", [8, 32, 100])
def test_characters_differ_at_any_size(size: int) -> None:
    masks = [mask(character, size).tobytes() for character in CHARACTERS]
    assert len(set(masks)) == len(CHARACTERS)
    assert all(max(each) > 100 for each in masks)


class Middling:
    """Randomness that is always in the middle: nothing is turned or moved, and noise is even."""

    def uniform(self, low: float, high: float, size: Any = ()) -> np.ndarray:
        return np.full(size, (low + high) / 2)

    def random(self, size: Any = (), dtype: Any = np.float64) -> np.ndarray:
        return np.full(size, 0.5, dtype)


def test_a_view_shows_its_character() -> None:
    masks = [mask(character, 32) for character in CHARACTERS]
    templates = np.stack([np.asarray(each, np.float32).ravel() for each in masks])
    rng: Any = Middling()
    for label, upright in enumerate(masks):
        likeness = np.corrcoef(draw(upright, rng).mean(0).ravel(), templates)[0, 1:]
        assert likeness.argmax() == label
