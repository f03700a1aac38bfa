from __future__ import annotations

import json
from dataclasses import asdict

import torch

from lowvram.data.spec import DataSpec, Layout, Modality, TensorLayout, layout_from

LABEL = TensorLayout((), "int64")


def test_examples_have_the_shapes_of_samples() -> None:
    inputs, targets = DataSpec(Modality.LABELLED_TOKENS, 3, (5,), 256).example(2)
    assert {name: tensor.tolist() for name, tensor in inputs.items()} == {
        "input_ids": [[0] * 5] * 2,
        "attention_mask": [[1] * 5] * 2,
    }
    assert targets.tolist() == [0, 0]


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
