"""task: criterion and scores, and which task a model is for."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from lowvram.config import BadInput
from lowvram.core.rig import IGNORE, Part
from lowvram.data.spec import DataSpec, Modality
from lowvram.tasks import Auto, Classification, Classifier, LanguageModel, LanguageModelling
from tests.laboratory import IMAGES, PROBLEMS, RESNET, TOKENS, TRANSFORMER


def test_auto_follows_the_model() -> None:
    assert isinstance(Auto().pose(TRANSFORMER, TOKENS), LanguageModel)
    assert isinstance(Auto().pose(RESNET, IMAGES), Classifier)
    assert isinstance(LanguageModelling().pose(TRANSFORMER, TOKENS), LanguageModel)
    assert isinstance(Classification().pose(RESNET, IMAGES), Classifier)


def test_a_task_for_other_models_is_refused() -> None:
    with pytest.raises(BadInput, match=r"task='language_modelling': must be .*images.*: leave task=auto"):
        LanguageModelling().pose(RESNET, IMAGES)
    with pytest.raises(BadInput, match=r"task='classification': must be .*tokens.*: leave task=auto"):
        Classification().pose(TRANSFORMER, TOKENS)


@pytest.mark.parametrize("shape", [(6,), (3, 2)], ids=["classes", "tokens"])
def test_the_criterion_is_a_sum_over_the_targets_that_count(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(*shape, 5, dtype=torch.float64), torch.randint(5, shape)
    targets.view(-1)[1] = IGNORE
    kept = targets.flatten() != IGNORE
    wanted = F.cross_entropy(logits.flatten(0, -2)[kept], targets.flatten()[kept], reduction="sum")
    found = PROBLEMS["transformer"].criterion(logits, Part(None, targets))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_sums_are_at_least_fp32(dtype: torch.dtype) -> None:
    """Half-precision logits: many small terms would be lost."""
    logits, part = torch.zeros(4096, 3, dtype=dtype), Part(None, torch.zeros(4096, dtype=torch.long))
    loss = PROBLEMS["resnet"].criterion(logits, part)
    assert loss.dtype is torch.promote_types(dtype, torch.float32)
    assert loss.item() == pytest.approx(4096 * math.log(3), rel=1e-5)


def test_correct_answers_are_counted_and_ignored_ones_never_are() -> None:
    logits = torch.eye(4)
    assert PROBLEMS["resnet"].num_correct(logits, Part(None, torch.tensor([0, 1, 0, IGNORE]))).item() == 2


def test_tokens_are_targets_or_where_texts_have_a_class_what_is_no_padding() -> None:
    labelled = Auto().pose(RESNET, DataSpec(Modality.LABELLED_TOKENS, 2, (3,), 256))
    inputs = {"input_ids": torch.ones(2, 3, dtype=torch.long), "attention_mask": torch.tensor([[1, 1, 0], [1, 0, 0]])}
    assert labelled.num_tokens(Part(inputs, torch.tensor([0, IGNORE]))).item() == 3
    assert labelled.num_targets(Part(inputs, torch.tensor([0, IGNORE]))).item() == 1
    assert PROBLEMS["transformer"].num_tokens(Part(None, torch.tensor([[4, IGNORE], [5, 6]]))).item() == 3


def test_scores() -> None:
    assert PROBLEMS["transformer"].scores(math.log(7), 0.5) == {"perplexity": pytest.approx(7), "accuracy": 0.5}
    assert PROBLEMS["transformer"].scores(1e6, 0.0)["perplexity"] == math.inf
    assert PROBLEMS["resnet"].scores(2.0, 0.25) == {"accuracy": 0.25}


def test_blocks_are_the_models_repeated_units() -> None:
    for name, count in (("transformer", 3), ("resnet", 3)):
        model = PROBLEMS[name].make_model()
        assert len(PROBLEMS[name].blocks(model)) == count
