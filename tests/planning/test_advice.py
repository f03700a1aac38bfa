"""Advice: it names what is large, and only options that are not in use."""

import pytest

from lowvram.config.registry import all_options, knob_of, neutral_options
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob
from lowvram.knobs.accum import Parts
from lowvram.planning.advice import out_of_memory_advice, remedies_against

NEUTRAL = dict(neutral_options())
ACTIVATIONS = {"activations": 71, "parameters": 20, "optimizer": 9, "gradients": None, "host": 500}
STATES = {"optimizer": 60, "activations": 30, "parameters": 10}


def knobs(options: dict[str, str]) -> dict[str, Knob]:
    return {group: knob_of((group, option)) for group, option in options.items()}


def test_the_largest_kind_is_named_with_its_share_of_device_memory():
    advice = out_of_memory_advice(ACTIVATIONS, knobs(NEUTRAL))
    assert advice == "activations are 71 % of the peak: try ckpt=every1 or accum=x8"
    advice = out_of_memory_advice(STATES, knobs(NEUTRAL))
    assert advice == "the optimizer's state is 60 % of the peak: try optimizer=adamw_8bit or stepping=cpu_offload"


@pytest.mark.parametrize(
    ("used", "offered"),
    [
        ({"ckpt": "every2"}, "ckpt=every1 or accum=x8"),
        ({"ckpt": "every1"}, "accum=x8 or offload=activations"),
        ({"ckpt": "every1", "accum": "x8"}, "offload=activations or precision=bf16"),
        ({"ckpt": "every1", "accum": "x8", "offload": "activations"}, "precision=bf16 or accum=x16"),
        ({"ckpt": "every1", "accum": "x32", "offload": "activations"}, "precision=bf16 or tile=mlp"),
        (
            {"ckpt": "every1", "accum": "x32", "offload": "activations", "tile": "mlp"},
            "precision=bf16 or optimizer=adamw_8bit",
        ),
    ],
)
def test_only_what_is_not_in_use_is_offered(used: dict[str, str], offered: str):
    # Among what is left, the optimizer's state weighs more than parameters.
    by_kind = ACTIVATIONS | {"optimizer": 21}
    assert out_of_memory_advice(by_kind, knobs(NEUTRAL | used)).endswith(f": try {offered}")


@pytest.mark.parametrize(
    ("kind", "used", "offered"),
    [
        ("optimizer", {}, "optimizer=adamw_8bit or stepping=cpu_offload"),
        ("optimizer", {"optimizer": "adamw_8bit"}, "optimizer=adamw_4bit or stepping=cpu_offload"),
        ("gradients", {}, "stepping=in_backward"),
        ("parameters", {}, "precision=bf16_pure or weights=stream"),
    ],
)
def test_each_kind_has_remedies_of_its_own(kind: str, used: dict[str, str], offered: str):
    assert f"try {offered}" in out_of_memory_advice({kind: 100}, knobs(NEUTRAL | used))


def test_what_is_not_possible_is_not_offered():
    def is_possible(group: str, option: str) -> bool:
        return (group, option) not in {("ckpt", "every1"), ("accum", "x8"), ("offload", "activations")}

    assert out_of_memory_advice(ACTIVATIONS, knobs(NEUTRAL), is_possible).endswith(": try accum=x4 or precision=bf16")


def test_an_option_is_offered_against_each_kind_that_it_remedies() -> None:
    offered = {(option, kind) for kind in Kind for option in remedies_against(kind)}
    assert offered == {(option, kind) for option in all_options() for kind in knob_of(option).remedies()}
    order = [option for _, option in remedies_against(Kind.INPUTS)]
    assert [option for option in order if option in ("x2", "x4", "x8", "x16")] == ["x8", "x4", "x2", "x16"]


def test_the_values_of_the_option_in_use_count() -> None:
    in_use = knobs(NEUTRAL | {"ckpt": "every1"}) | {"accum": Parts(8)}
    assert out_of_memory_advice(ACTIVATIONS, in_use).endswith(": try offload=activations or precision=bf16")


@pytest.mark.parametrize(
    "used", [{"accum": "auto"}, {"ckpt": "compiler"}, {"precision": "fp8"}, {"offload": "parameters"}], ids=str
)
def test_an_option_in_use_that_does_as_well_stays(used: dict[str, str]) -> None:
    (group,) = used
    by_kind = {kind.value: 1.0 for kind in Kind}
    for kind in Kind:
        advice = out_of_memory_advice(by_kind | {kind.value: 9.0}, knobs(NEUTRAL | used))
        assert f"{group}=" not in advice.replace("precision=bf16_pure", "")


def test_the_end_of_all_options():
    used = {"ckpt": "every1", "accum": "x32", "precision": "bf16_pure", "optimizer": "sgd"}
    used |= {"offload": "parameters", "stepping": "in_backward", "tile": "mlp"}
    assert out_of_memory_advice(ACTIVATIONS, knobs(used)).endswith(": try a smaller model or a larger vram")


def test_tensors_that_would_fit_are_not_to_blame():
    """A compiler, a library: they take memory of their own."""
    advice = "the tensors of a step take only 0.00 MiB of it: try {}a larger vram"
    assert out_of_memory_advice(ACTIVATIONS, knobs(NEUTRAL), room_bytes=300) == advice.format("")
    compiled = NEUTRAL | {"compile": "blocks"}
    assert out_of_memory_advice(ACTIVATIONS, knobs(compiled), room_bytes=300) == advice.format("compile=none or ")
    assert out_of_memory_advice(ACTIVATIONS, knobs(NEUTRAL), room_bytes=100).startswith("activations are")


@pytest.mark.parametrize("by_kind", [None, {}, {"activations": 0}])
def test_without_a_measurement_nothing_is_claimed(by_kind: dict[str, float] | None):
    assert out_of_memory_advice(by_kind, knobs(NEUTRAL)) == "try ckpt=every1 or accum=x8"
