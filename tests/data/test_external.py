from __future__ import annotations

import json
import random
import re
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from lowvram.config.errors import BadInput, BadSample
from lowvram.core.rig import Part
from lowvram.data.batch_sizes import SameSize
from lowvram.data.external import External
from lowvram.data.loader import Inline
from lowvram.data.source import Data
from lowvram.data.spec import DataSpec, Layout, Modality, TensorLayout, layout_from
from tests import yours

CPU = torch.device("cpu")
TEXT = {"input_ids": [3, 4], "labels": 1}


def opened(samples: list[Any], held_out: list[Any] | None = None, **fields: Any) -> Data:
    """The data of a function that is called without arguments."""
    return made_by(partial(yours.listed, samples, held_out), **fields)


def made_by(make: Any, **fields: Any) -> Data:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yours, "here", make, raising=False)
        return External("tests.yours.here", **fields).open(seed=0)


@pytest.mark.parametrize(
    ("sample", "spec"),
    [
        ((torch.tensor([1, 2]), torch.tensor([2, 3])), DataSpec(Modality.TOKENS, 4, (2,))),
        (([1, 2], np.array([2, 3], np.int32)), DataSpec(Modality.TOKENS, 4, (2,))),
        ((np.zeros((3, 4, 4)), 2), DataSpec(Modality.IMAGES, 3, (3, 4, 4))),
        (TEXT, DataSpec(Modality.LABELLED_TOKENS, 2, (2,), 50, is_padded=False)),
        ({**TEXT, "attention_mask": [1, 0]}, DataSpec(Modality.LABELLED_TOKENS, 2, (2,), 50)),
        (({"input_ids": torch.tensor([3, 4])}, 1), DataSpec(Modality.LABELLED_TOKENS, 2, (2,), 50, is_padded=False)),
    ],
)
def test_what_samples_are_follows_from_the_first(sample: Any, spec: DataSpec) -> None:
    vocab_size = 50 if spec.modality is Modality.LABELLED_TOKENS else None
    data = opened([sample] * 3, vocab_size=vocab_size)
    assert data.spec == spec
    batch = next(Inline().batches(data.train, SameSize(2), 0, 0, CPU))
    inputs, targets = spec.example(2)
    assert batch.targets.shape == targets.shape
    assert [each.shape for each in batch.map(lambda each: each).tensors()[:-1]] == [
        each.shape for each in (inputs.values() if isinstance(inputs, dict) else [inputs])
    ]


def test_anything_else_is_reported_by_its_layout() -> None:
    data = External("tests.yours.curve", {"num_samples": 8}).open(seed=0)
    float32 = partial(TensorLayout, dtype="float32")
    layout = Layout((("", float32((4,))),), float32((2,)))
    assert data.spec == DataSpec(Modality.OTHER, 0, (4,), layout=layout)
    inputs, targets = data.spec.example(3)
    assert (inputs.shape, targets.shape) == ((3, 4), (3, 2))
    assert (len(data.train), len(data.eval)) == (8, 2)


@pytest.mark.parametrize(
    "targets", [{"a": 1, "b": [0.5, 2.0]}, (1, np.zeros(2)), [torch.tensor(1), torch.zeros(2)], {"a": {"b": (1, 2.5)}}]
)
def test_targets_may_be_several_tensors(targets: Any) -> None:
    data = opened([([1.0, 2.0], targets)] * 3)
    batch = next(Inline().batches(data.train, SameSize(2), 0, 0, CPU))
    inputs, like = data.spec.example(2)
    told = [(each.shape, each.dtype) for each in batch.tensors()]
    assert [(each.shape, each.dtype) for each in Part(inputs, like).tensors()] == told
    assert len(told) == 3
    assert layout_from(json.loads(json.dumps(asdict(data.spec)["layout"]))) == data.spec.layout


def test_a_tensor_of_several_that_differs_is_named() -> None:
    data = opened([(1.0, {"a": 1, "b": 2.0}), (1.0, {"a": 1, "b": [2.0]})])
    message = "float32 () with a int64 (), b float32 (1,), where the first has float32 () with a int64 (), b float32 ()"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        data.train.sample(1, 0)


def test_more_tensors_than_texts_usually_have_are_kept() -> None:
    data = opened([{**TEXT, "token_type_ids": [0, 1]}], vocab_size=50)
    assert data.spec.modality is Modality.LABELLED_TOKENS
    assert set(data.spec.example(1)[0]) == {"input_ids", "token_type_ids", "attention_mask"}
    assert data.train.sample(0, 0)[0]["attention_mask"].tolist() == [1, 1]


def test_the_number_of_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    image = torch.zeros(3, 2, 2)
    assert opened([(image, 1), (image, 5), (image, -100)]).spec.num_classes == 6
    assert opened([(image, 1)], num_classes=9).spec.num_classes == 9
    monkeypatch.setattr("lowvram.data.external.FEW", 1)
    with pytest.raises(
        BadInput, match=r"data\.num_classes=null: must be given: the dataset has no `targets`, and its [0-9]+ samples"
    ):
        opened([(image, 1), (image, 5)])
    monkeypatch.setattr(yours.Listed, "targets", [1, 5], raising=False)
    assert opened([(image, 1), (image, 5)]).spec.num_classes == 6


def test_a_vocabulary_that_nobody_knows_is_asked_for() -> None:
    with pytest.raises(BadInput, match=r"data\.vocab_size=null: must be how many tokens there are"):
        opened([TEXT])


def test_a_model_that_pins_its_vocabulary_says_it(classifier_of_texts) -> None:
    assert External("x.y").resolve(classifier_of_texts(vocab_size=40)) == External("x.y", vocab_size=40)


def test_what_is_random_is_a_function_of_seed_epoch_and_index() -> None:
    data = made_by(yours.noisy)

    def draw(index: int, epoch: int) -> list[float]:
        inputs, targets = data.train.sample(index, epoch)
        return [*inputs.tolist(), *targets.tolist()]

    before = torch.get_rng_state(), random.getstate()
    assert draw(1, 0) == draw(1, 0)
    assert len({*draw(1, 0), *draw(2, 0), *draw(1, 1), *data.eval.sample(1, 0)[0].tolist()}) == 14
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_held_out_samples_can_be_limited() -> None:
    image = torch.zeros(3, 2, 2)
    assert len(opened([(image, 1)] * 9, eval_samples=4).eval) == 4
    assert len(opened([(image, 1)] * 3, eval_samples=4).eval) == 3


PAIR = r"data\.target='tests\.yours\.here': must be a function that returns a pair of datasets"
SAMPLE = r"data\.target='tests\.yours\.here': must be a function whose samples can be used: number 0 of the samples"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (yours.nothing, rf"{PAIR}.* returned a NoneType"),
        (lambda: (1, 2), rf"{PAIR}.* returned a int, which has no length or items"),
        (partial(yours.listed, []), rf"{PAIR}.* returned an empty Listed"),
        (partial(yours.listed, ["text"]), rf"{SAMPLE} to train on is a str: a sample must be a pair"),
        (partial(yours.listed, [("text", 1)]), rf"{SAMPLE} to train on is made of a str"),
        (
            partial(yours.listed, [{"x": 1}]),
            rf"{SAMPLE} to train on is a dictionary of x: must hold one of labels, label",
        ),
        (
            partial(yours.listed, [([1.0], 0)], [([1.0, 2.0], 0)]),
            rf"{SAMPLE} held out has float32 \(2,\) with int64 \(\), where the first has float32 \(1,\)",
        ),
        (
            partial(yours.listed, [([1.0], 0)], [([1.0], 3)]),
            rf"{SAMPLE} held out has the label 3, outside the 1 classes",
        ),
    ],
)
def test_what_cannot_be_used_is_refused(make: Any, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        made_by(make)


def test_a_later_sample_that_cannot_be_used_is_named() -> None:
    data = opened([([1.0], 0), ([1.0, 2.0], 0), ([1.0], 7)], num_classes=2)
    with pytest.raises(RuntimeError, match=r"^number 1 of the samples to train on has float32 \(2,\)"):
        data.train.sample(1, 0)
    with pytest.raises(
        RuntimeError, match=r"^number 2 of the samples to train on has the label 7, outside the 2 classes"
    ):
        data.train.sample(2, 0)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nowhere.at.all", r"data\.target='nowhere\.at\.all': must be .*: there is no module nowhere"),
        ("tests.yours.nope", r"data\.target='tests\.yours\.nope': must be .*: tests\.yours has no nope"),
    ],
)
def test_a_name_without_anything_behind_it(target: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        External(target).open(seed=0)


def test_arguments_that_do_not_fit() -> None:
    with pytest.raises(BadInput, match=r"data\.args=\{'size': 3\}: must be what tests\.yours\.curve takes \(got an"):
        External("tests.yours.curve", {"size": 3}).open(seed=0)


def test_integers_of_few_bits_become_those_that_losses_take() -> None:
    image = np.zeros((3, 4, 4), np.float32)
    for kind in (np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.int64):
        mask = np.ones((4, 4), kind)
        assert opened([(image, mask)] * 3).train.sample(0, 0)[1].dtype is torch.int64, kind
        assert opened([(image, kind(2))] * 3).spec.num_classes == 3, kind
        tokens = opened([(np.array([1, 2], kind), np.array([2, 3], kind))] * 3)
        assert tokens.spec == DataSpec(Modality.TOKENS, 4, (2,)), kind
    assert opened([(image, True), (image, False)] * 3).spec == DataSpec(Modality.IMAGES, 2, (3, 4, 4))
    bytes_of_image = np.full((3, 4, 4), 200, np.uint8)
    assert opened([(bytes_of_image, 1)] * 3).train.sample(0, 0)[0].dtype is torch.uint8  # the model's own affair


def test_what_is_no_tensor_is_named_with_its_key() -> None:
    for value in ("a/b.png", None, ["x", "y"], np.array(["x"]), [[1], [1, 2]], {"a": 1}):
        with pytest.raises(
            BadInput, match=r"number 0 of the samples to train on is made of a \w+ under 'name'.*leave it"
        ):
            opened([{"x": [1.0], "name": value, "label": 1}] * 3)
    with pytest.raises(BadInput, match=r"made of a str as a target: tensors, arrays and numbers can be used"):
        opened([([1.0], "cat")] * 3)


def test_samples_of_several_shapes_are_one_sentence() -> None:
    samples = [([1, 2], [2, 3]), ([1, 2, 3], [2, 3, 4]), ([1, 2], [2, 3])]
    with pytest.raises(
        BadInput, match=r"number 1 of the samples to train on has int64 \(3,\) .* the first has int64 \(2,"
    ):
        opened(samples)
    with pytest.raises(BadSample, match=r"^number 1 of the samples to train on has"):
        opened(samples, num_classes=9).train.sample(1, 0)


def test_a_label_of_no_class_is_found_before_the_first_step_where_labels_are_known() -> None:
    inputs, labels = torch.zeros(9, 2), torch.tensor([0, 1, 2, 0, 1, 7, 2, -100, 1])
    sets = TensorDataset(inputs, labels), TensorDataset(inputs[:2], labels[:2])
    with pytest.raises(BadInput, match=r"number 5 of the samples to train on has the label 7, outside the 3 classes"):
        made_by(lambda: sets, num_classes=3)
    assert made_by(lambda: sets).spec.num_classes == 8
    assert made_by(lambda: sets, num_classes=8).spec.num_classes == 8
