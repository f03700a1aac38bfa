from __future__ import annotations

import pytest
import torch

from lowvram.config.errors import BadInput
from lowvram.core.rig import IGNORE
from lowvram.data.source import Data
from lowvram.data.spec import DataSpec, Modality, TextRules, pairs_layout
from lowvram.data.synthetic import Synthetic
from tests.data.conftest import FakeModel


def opened(source: Synthetic, model, seed: int = 0) -> Data:
    return source.resolve(model).open(seed)


def test_follows_the_natural_shape_and_the_pinned_classes(token_model, image_model) -> None:
    tokens, images = Modality.TOKENS, Modality.IMAGES
    assert opened(Synthetic(), token_model()).spec == DataSpec(tokens, 256, (32,))
    assert opened(Synthetic(), token_model(vocab_size=50)).spec == DataSpec(tokens, 50, (32,))
    assert opened(Synthetic(), image_model()).spec == DataSpec(images, 1000, (3, 24, 24))
    assert opened(Synthetic(), image_model(num_classes=7)).spec == DataSpec(images, 7, (3, 24, 24))


def test_its_own_fields_come_first(token_model, image_model) -> None:
    source = Synthetic(sequence_length=5, image_size=9, vocab_size=11, num_classes=13)
    assert opened(source, token_model(vocab_size=50)).spec == DataSpec(Modality.TOKENS, 11, (5,))
    assert opened(source, image_model(num_classes=7)).spec == DataSpec(Modality.IMAGES, 13, (3, 9, 9))


def test_tokens(token_model) -> None:
    data = opened(Synthetic(vocab_size=10), token_model())
    inputs, targets = data.train.sample(3, epoch=0)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[1:], targets[:-1])
    seen = torch.cat([data.train.sample(index, 0)[0] for index in range(16)]).unique()
    assert torch.equal(seen, torch.arange(10))


def test_labelled_tokens(classifier_of_texts) -> None:
    labelled = Modality.LABELLED_TOKENS
    model = classifier_of_texts(vocab_size=50, num_classes=3, text_rules=TextRules(end_id=49))
    assert opened(Synthetic(), classifier_of_texts()).spec == DataSpec(labelled, 2, (32,), 256, is_padded=False)
    data = opened(Synthetic(sequence_length=9), model)
    assert data.spec == DataSpec(labelled, 3, (9,), 50, is_padded=False)
    samples = [data.train.sample(index, 0) for index in range(16)]
    assert {int(label) for _, label in samples} == {0, 1, 2}
    assert all(inputs["input_ids"][-1] == 49 for inputs, _ in samples)
    assert all(inputs["attention_mask"].tolist() == [1] * 9 for inputs, _ in samples)


def test_masked_tokens_and_pairs() -> None:
    masked = FakeModel(Modality.MASKED_TOKENS, (32,), vocab_size=50)
    data = opened(Synthetic(sequence_length=9), masked)
    assert data.spec == DataSpec(Modality.MASKED_TOKENS, 50, (9,), is_padded=False)
    inputs, targets = data.train.sample(0, 0)
    assert ((targets == IGNORE) | (targets == inputs["input_ids"])).all()
    assert targets[0] != IGNORE
    pairs = FakeModel(Modality.PAIRS, (32,), vocab_size=50, text_rules=TextRules(start_id=7))
    data = opened(Synthetic(target_length=4), pairs)
    assert data.spec == DataSpec(Modality.PAIRS, 50, (32,), layout=pairs_layout(32, 4), is_padded=False)
    inputs, targets = data.train.sample(0, 0)
    assert inputs["decoder_input_ids"].tolist() == [7, *targets[:-1].tolist()]


def test_images(image_model) -> None:
    image, label = opened(Synthetic(), image_model()).train.sample(3, epoch=0)
    assert (image.shape, image.dtype) == ((3, 24, 24), torch.float32)
    assert 0 <= label < 1000


def test_samples_are_views_of_one_pool_and_differ_by_seed(image_model) -> None:
    data = opened(Synthetic(eval_samples=40), image_model())
    image = data.train.sample(1, 0)[0]
    assert len(data.eval) == 40
    assert data.train.sample(17, 5)[0].data_ptr() == image.data_ptr()
    assert torch.equal(opened(Synthetic(), image_model()).train.sample(1, 0)[0], image)
    assert not torch.equal(opened(Synthetic(), image_model(), seed=1).train.sample(1, 0)[0], image)
    assert not any(torch.equal(data.eval.sample(index, 0)[0], image) for index in range(40))


def test_cannot_be_opened_unresolved() -> None:
    with pytest.raises(BadInput, match="data='synthetic'"):
        Synthetic().open(seed=0)
