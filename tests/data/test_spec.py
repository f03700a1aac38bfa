from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch

from lowvram.data.spec import DataSpec, Layout, Modality, TensorLayout, TextRules, layout_from

LABEL = TensorLayout((), "int64")


def test_examples_have_the_shapes_of_samples() -> None:
    inputs, targets = DataSpec(Modality.LABELLED_TOKENS, 3, (5,), 256).example(2)
    assert {name: tensor.tolist() for name, tensor in inputs.items()} == {
        "input_ids": [[0] * 5] * 2,
        "attention_mask": [[1, 1, 1, 1, 0]] * 2,
    }
    assert targets.tolist() == [0, 0]
    whole, _ = DataSpec(Modality.LABELLED_TOKENS, 3, (5,), 256, is_padded=False).example(2)
    assert whole["attention_mask"].tolist() == [[1] * 5] * 2


def test_a_layout_comes_back_from_json() -> None:
    layout = Layout((("a", TensorLayout((2, 3), "float32")), ("b", LABEL)), TensorLayout((4,), "bool"))
    assert layout_from(json.loads(json.dumps(asdict(layout)))) == layout


def test_a_layout_says_what_a_modality_does_not() -> None:
    layout = Layout((("a", TensorLayout((2,), "float32")), ("attention_mask", LABEL)), TensorLayout((4,), "bool"))
    inputs, targets = DataSpec(Modality.OTHER, 0, (2,), layout=layout).example(3)
    assert (inputs["a"].shape, inputs["a"].dtype) == ((3, 2), torch.float32)
    assert inputs["attention_mask"].tolist() == [1, 1, 1]
    assert (targets.shape, targets.dtype) == ((3, 4), torch.bool)


def test_a_nameless_input_is_no_dictionary() -> None:
    inputs, _ = DataSpec(Modality.OTHER, 0, (), layout=Layout((("", LABEL),), LABEL)).example(3)
    assert inputs.tolist() == [0, 0, 0]


PLAIN, ENDED = TextRules(pad_id=9), TextRules(pad_id=9, end_id=1)


@pytest.mark.parametrize(
    ("rules", "tokens", "ids", "num_kept"),
    [
        (PLAIN, [5, 6], [5, 6, 9, 9], 2),
        (PLAIN, [5, 6, 7, 8, 5], [5, 6, 7, 8], 4),
        (PLAIN, [], [9, 9, 9, 9], 0),
        (ENDED, [5, 6], [5, 6, 1, 9], 3),
        (ENDED, [5, 6, 1], [5, 6, 1, 9], 3),
        (ENDED, [5, 6, 7, 8], [5, 6, 7, 1], 4),
        (ENDED, [5, 6, 7, 8, 1], [5, 6, 7, 1], 4),
        (ENDED, [], [1, 9, 9, 9], 1),
    ],
)
def test_a_text_is_cut_ended_and_filled_up(rules: TextRules, tokens: list[int], ids: list[int], num_kept: int) -> None:
    inputs = rules.padded(np.array(tokens, np.uint8), 4)
    assert {name: tensor.tolist() for name, tensor in inputs.items()} == {
        "input_ids": ids,
        "attention_mask": [1] * num_kept + [0] * (4 - num_kept),
    }


def test_an_end_that_no_byte_can_be() -> None:
    assert TextRules(end_id=50_000).padded(np.array([5], np.uint8), 3)["input_ids"].tolist() == [5, 50_000, 0]
