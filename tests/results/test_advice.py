"""Advice: it names what is large, and only options that are not in use."""

import pytest

from lowvram.results.advice import data_wait_advice, out_of_memory_advice

NEUTRAL = {"ckpt": "none", "accum": "none", "precision": "fp32", "optimizer": "adamw"}
ACTIVATIONS = {"activations": 71, "parameters": 20, "optimizer": 9, "gradients": None, "host": 500}
STATES = {"optimizer": 60, "activations": 30, "parameters": 10}


def test_the_largest_kind_is_named_with_its_share_of_device_memory():
    advice = out_of_memory_advice(ACTIVATIONS, NEUTRAL)
    assert advice == "activations are 71 % of the peak: try ckpt=every1 or accum=x8"
    advice = out_of_memory_advice(STATES, NEUTRAL)
    assert advice == "the optimizer's state is 60 % of the peak: try optimizer=sgd or ckpt=every1"


@pytest.mark.parametrize(
    ("used", "offered"),
    [
        ({"ckpt": "every2"}, "ckpt=every1 or accum=x8"),
        ({"ckpt": "every1"}, "accum=x8 or precision=bf16"),
        ({"ckpt": "every1", "accum": "x8"}, "accum=x16 or precision=bf16"),
        ({"ckpt": "every1", "accum": "x32"}, "precision=bf16 or optimizer=sgd"),
        ({"ckpt": "every1", "accum": "x32", "precision": "fp16"}, "optimizer=sgd"),
    ],
)
def test_only_what_is_not_in_use_is_offered(used: dict[str, str], offered: str):
    assert out_of_memory_advice(ACTIVATIONS, NEUTRAL | used).endswith(f": try {offered}")


def test_the_end_of_all_options():
    used = {"ckpt": "every1", "accum": "x32", "precision": "bf16", "optimizer": "sgd"}
    assert out_of_memory_advice(ACTIVATIONS, used).endswith(": try a smaller model or a larger vram")


@pytest.mark.parametrize("by_kind", [None, {}, {"activations": 0}])
def test_without_a_measurement_nothing_is_claimed(by_kind: dict[str, float] | None):
    assert out_of_memory_advice(by_kind, NEUTRAL) == "try ckpt=every1 or accum=x8"


def test_waiting_for_data():
    expected = "23 % of the time was spent waiting for data: try loader=workers"
    assert data_wait_advice(0.234, {"loader": "inline"}) == expected
    assert data_wait_advice(0.234, {"loader": "workers"}) is None
    assert data_wait_advice(0.1, {"loader": "inline"}) is None
    assert data_wait_advice(None, {"loader": "inline"}) is None
