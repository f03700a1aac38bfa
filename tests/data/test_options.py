"""Every YAML of the groups data and loader repeats the defaults of its class; bad values are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from lowvram.config.errors import BadInput
from lowvram.config.schema import build

CONF = Path(__file__).parents[2] / "conf"
OPTIONS = sorted([*(CONF / "data").glob("*.yaml"), *(CONF / "loader").glob("*.yaml")])
NEEDED = {  # fields that the user has to give
    "text": ("path",),
    "imagefolder": ("path",),
    "hub": ("name",),
    "chat": ("name",),
    "pairs": ("name", "text", "target"),
    "external": ("target",),
}


def node(option: Path) -> DictConfig:
    config = OmegaConf.load(option)
    assert isinstance(config, DictConfig)
    return config


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.stem)
def test_a_yaml_repeats_the_defaults_of_its_class(option: Path) -> None:
    config = node(option)
    given = dict.fromkeys(NEEDED.get(option.stem, ()), "somewhere")
    built = build(OmegaConf.merge(config, given), option.parent.name)  # pyright: ignore[reportArgumentType]
    assert built == type(built)(**given)


@pytest.mark.parametrize("option", sorted((CONF / "data").glob("*.yaml")), ids=lambda option: option.stem)
def test_a_source_lives_in_a_module_of_its_options_name(option: Path) -> None:
    """A refusal names the option by it."""
    assert node(option)["_target_"].split(".")[:-1] == ["lowvram", "data", option.stem]


@pytest.mark.parametrize(("option", "field"), [(option, fields[0]) for option, fields in NEEDED.items()])
def test_what_is_missing_is_named(option: str, field: str) -> None:
    with pytest.raises(BadInput, match=rf"data\.{field}="):
        build(node(CONF / "data" / f"{option}.yaml"), "data")


@pytest.mark.parametrize(
    ("option", "field", "value"),
    [
        ("auto", "sequence_length", 0),
        ("auto", "image_size", 0),
        ("auto", "eval_samples", 0),
        ("python_source", "sequence_length", -1),
        ("python_source", "max_bytes", 0),
        ("python_source", "eval_samples", 0),
        ("python_packages", "sequence_length", 0),
        ("python_packages", "num_samples", 0),
        ("python_packages", "eval_samples", 0),
        ("glyphs", "image_size", 7),
        ("glyphs", "num_samples", 0),
        ("glyphs", "eval_samples", 0),
        ("synthetic", "sequence_length", 0),
        ("synthetic", "image_size", 0),
        ("synthetic", "vocab_size", 0),
        ("synthetic", "num_classes", 0),
        ("synthetic", "eval_samples", 0),
        ("text", "sequence_length", 0),
        ("text", "eval_samples", 0),
        ("imagefolder", "image_size", 0),
        ("imagefolder", "min_area", 0.0),
        ("imagefolder", "min_area", 1.5),
        ("imagefolder", "min_area", float("nan")),
        ("imagefolder", "eval_samples", 0),
        ("hub", "sequence_length", 0),
        ("hub", "image_size", 0),
        ("hub", "min_area", 0.0),
        ("hub", "buffer_samples", 0),
        ("hub", "eval_samples", 0),
        ("hub", "masked_share", 0.0),
        ("text", "masked_share", 1.0),
        ("chat", "sequence_length", 0),
        ("pairs", "sequence_length", 0),
        ("pairs", "target_length", 0),
        ("pairs", "eval_samples", 0),
        ("chat", "eval_samples", 0),
        ("external", "num_classes", 0),
        ("external", "vocab_size", 0),
        ("external", "eval_samples", 0),
        ("workers", "num_workers", 0),
        ("workers", "prefetch", 0),
    ],
)
def test_values_out_of_range_are_named(option: str, field: str, value: float) -> None:
    group = "loader" if option == "workers" else "data"
    config = node(CONF / group / f"{option}.yaml")
    config[field] = value
    for name in NEEDED.get(option, ()):
        config[name] = "somewhere"
    with pytest.raises(BadInput, match=rf"{group}\.{field}={value}"):
        build(config, group)
