"""task: criterion and scores, and which task a model is for."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from lowvram.config.errors import BadInput
from lowvram.core.assemble import assemble
from lowvram.core.rig import IGNORE, Part
from lowvram.core.structure import Blocks
from lowvram.data.spec import DataSpec, Modality
from lowvram.tasks import Auto, Classification, Classifier, External, LanguageModel, LanguageModelling
from tests.laboratory import CPU, IMAGES, PROBLEMS, RESNET, TOKENS, TRANSFORMER, knobs_of


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
    logits, part = torch.zeros(4096, 5, dtype=dtype), Part(None, torch.zeros(4096, dtype=torch.long))
    loss = PROBLEMS["resnet"].criterion(logits, part)
    assert loss.dtype is torch.promote_types(dtype, torch.float32)
    assert loss.item() == pytest.approx(4096 * math.log(5), rel=1e-5)


def test_correct_answers_are_counted_and_ignored_ones_never_are() -> None:
    logits = torch.eye(4)
    assert PROBLEMS["resnet"].num_correct(logits, Part(None, torch.tensor([0, 1, 0, IGNORE]))).item() == 2


def test_tokens_are_targets_or_where_texts_have_a_class_what_is_no_padding() -> None:
    labelled = Auto().pose(RESNET, DataSpec(Modality.LABELLED_TOKENS, 2, (3,), 256))
    inputs = {"input_ids": torch.ones(2, 3, dtype=torch.long), "attention_mask": torch.tensor([[1, 1, 0], [1, 0, 0]])}
    assert labelled.num_tokens(Part(inputs, torch.tensor([0, IGNORE]))).item() == 3
    assert labelled.num_targets(Part(inputs, torch.tensor([0, IGNORE]))).item() == 1
    transformer, targets = PROBLEMS["transformer"], torch.tensor([[4, IGNORE], [5, 6]])
    assert transformer.token_counts(Part(targets, targets)).tolist() == [3, 4]
    prompt = torch.tensor([[IGNORE, IGNORE, 4, IGNORE]])  # up to the last that has a target, all are real
    assert transformer.token_counts(Part(prompt, prompt)).tolist() == [3, 4]
    assert PROBLEMS["resnet"].token_counts(Part(torch.zeros(2, 3, 8, 8), torch.tensor([1, IGNORE]))).tolist() == [1, 1]


def test_scores() -> None:
    assert PROBLEMS["transformer"].scores(math.log(7), 0.5) == {"perplexity": pytest.approx(7), "accuracy": 0.5}
    assert PROBLEMS["transformer"].scores(1e6, 0.0)["perplexity"] == math.inf
    assert PROBLEMS["resnet"].scores(2.0, 0.25) == {"accuracy": 0.25}


def test_blocks_are_the_models_repeated_units() -> None:
    for name, count in (("transformer", 3), ("resnet", 3)):
        model = PROBLEMS[name].make_model()
        assert len(PROBLEMS[name].structure(model).blocks) == count


# A task of one's own

OTHER = DataSpec(Modality.OTHER, 0, (4,))
TWO = Part(None, torch.tensor([[1.0, 2.0], [3.0, IGNORE]]))


def test_a_loss_of_ones_own() -> None:
    task = External("tests.yours.Regression", {"factor": 2.0}).pose(TRANSFORMER, OTHER)
    assert task.num_targets(TWO).item() == 3  # it may leave them out
    assert task.criterion(torch.zeros(2, 2), Part(None, torch.ones(2, 2))).item() == 8
    assert task.num_targets(TWO).item() == 4  # as is known by now, -100.0 is a value like any other to it
    assert task.scores(1.0, 0.5) == {}
    assert task.num_correct(torch.zeros(2, 2), TWO).item() == 0
    model = TRANSFORMER.make(TOKENS)
    assert task.structure(model).blocks == PROBLEMS["transformer"].structure(model).blocks
    assert task.structure(model).head is None  # nobody knows whether the criterion is a cross-entropy
    assert task.structure(model).get(Blocks()).has_plain_blocks


def test_a_task_of_ones_own_may_say_more() -> None:
    task, model = External("tests.yours.Everything").pose(TRANSFORMER, OTHER), TRANSFORMER.make(TOKENS)
    assert task.num_targets(TWO).item() == 14
    assert task.num_correct(torch.zeros(1, 2), Part(None, torch.tensor([[0.1, 2.0]]))).item() == 1
    assert task.scores(1.0, 0.5) == {"accuracy": 0.5}
    assert task.structure(model).blocks == [next(model.children())]
    assert not task.structure(model).get(Blocks()).has_plain_blocks


def test_the_number_of_targets_is_the_tasks() -> None:
    task = External("tests.yours.Everything").pose(TRANSFORMER, TOKENS)
    rig = assemble(task, knobs_of(), CPU)
    assert rig.total([TWO, TWO]).item() == 28


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("tests.yours.Nope", r"task\.target='tests\.yours\.Nope': must be .*: tests\.yours has no Nope"),
        ("tests.yours.Listed", r"task\.args=\{\}: must be what tests\.yours\.Listed takes"),
        ("tests.yours.nothing", r"objects have criterion\(outputs, targets\): this made a NoneType without one"),
    ],
)
def test_what_is_no_task_is_refused(target: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        External(target).pose(TRANSFORMER, TOKENS)


def test_a_criterion_that_returns_no_sum_is_refused() -> None:
    task = External("tests.yours.Mean").pose(TRANSFORMER, OTHER)
    with pytest.raises(BadInput, match=r"task\.target='tests\.yours\.Mean.*: must be .* returns one number"):
        task.criterion(torch.zeros(2, 2), TWO)


def test_data_of_no_known_kind_need_a_task() -> None:
    with pytest.raises(BadInput, match=r"task='auto': must be external for data that are other tensors"):
        Auto().pose(TRANSFORMER, OTHER)
