"""From YAML to frozen values: what fits is built, the rest is refused in one sentence with the dotted key."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from lowvram.config.errors import BadInput, require
from lowvram.config.schema import build, build_as
from lowvram.data.text import Text
from lowvram.knobs.ckpt import RecomputeEvery
from lowvram.models.resnet import BlockKind, ResNetConfig

RESNET = "lowvram.models.resnet.ResNetConfig"


def built(target: str | None = RESNET, **values: Any) -> Any:
    node = OmegaConf.create({"_target_": target, **values})
    assert isinstance(node, DictConfig)
    return build(node, "model")


def refusal(target: str | None = RESNET, **values: Any) -> str:
    with pytest.raises(BadInput) as refused:
        built(target, **values)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_node_becomes_its_dataclass() -> None:
    assert built() == ResNetConfig()
    found = built(layers=[1, 2], block="bottleneck", num_classes=None, in_place=False, dropout=1e-1, width="8")
    assert found == ResNetConfig(BlockKind.bottleneck, [1, 2], 8, num_classes=None, in_place=False, dropout=0.1)
    assert type(found.layers) is list


def test_the_same_values_make_the_same_object() -> None:
    """So a sweep's points share it, and yet a mistake is told each time under its own key."""
    assert built(width=24) is built(width=24)
    assert built(width=24) is not built(width=32)
    assert built(dropout=0) is not built(dropout=0.5)
    for key in ("model", "other"):
        with pytest.raises(BadInput, match=f"^{key}.width='wide'"):
            build(DictConfig({"_target_": RESNET, "width": "wide"}), key)


def test_interpolations_are_resolved() -> None:
    config = OmegaConf.create({"width": 24, "model": {"_target_": RESNET, "width": "${width}"}})
    assert build(config.model, "model").width == 24
    config.width = 32
    assert build(config.model, "model").width == 32


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "builtins.eval",
        "subprocess.Popen",
        "lowvramx.Y",
        "lowvram",
        "",
        None,
        5,
        "..os",
        "Lowvram.config.X",
    ],
)
def test_a_target_outside_the_package_is_refused(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib, "import_module", lambda name: pytest.fail(f"{name} was imported"))
    assert "model._target_=" in refusal(target)
    allowed = "a class inside lowvram or an installed plug-in: a configuration never runs other code"
    assert refusal(target).endswith(f"must be {allowed}")


@pytest.mark.parametrize(
    "target",
    [
        "lowvram.os",
        "lowvram.",
        "lowvram..x",
        "lowvram.nowhere.X",
        "lowvram.models.resnet.Nothing",
        "lowvram.models.resnet.ResNetConfig.make",
        "lowvram.config.schema.importlib.import_module",
        "lowvram.config.schema.build",
        "lowvram.config.schema.DictConfig",
        "lowvram.config.schema.BadInput",
        "lowvram.models.resnet.math",
    ],
)
def test_what_the_package_holds_but_is_no_dataclass_of_it_is_refused(target: str) -> None:
    assert refusal(target).startswith(f"model._target_='{target}': must be ")


def test_a_dataclass_that_the_package_only_imports_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Foreign:
        pass

    monkeypatch.setattr("lowvram.models.resnet.Foreign", Foreign, raising=False)
    Foreign.__module__ = "somewhere.else"
    assert refusal("lowvram.models.resnet.Foreign").endswith("must be a dataclass of lowvram")


def test_a_dependency_that_is_missing_is_not_called_a_wrong_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ModuleNotFoundError("No module named 'torchao'", name="torchao")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(ModuleNotFoundError, match="torchao"):
        built()


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("model.width._target_", {"width": {"_target_": "os.system"}}),
        ("model.layers[1]._target_", {"layers": [1, {"_target_": "os.system"}]}),
        ("model.a.b._target_", {"a": {"b": {"_target_": "os.system"}}}),
    ],
)
def test_a_target_outside_the_package_is_refused_at_any_depth(key: str, values: dict[str, Any]) -> None:
    assert refusal(**values).startswith(f"{key}='os.system': must be a class inside lowvram")


def test_a_node_without_a_target_is_no_option() -> None:
    with pytest.raises(BadInput, match="model=null: must be an option of the group model"):
        build(OmegaConf.create({"width": 8}), "model")


def test_an_unknown_key_is_refused_with_those_that_are_known() -> None:
    assert refusal(widht=8).startswith("model.widht=8: must be removed: model knows init, block, layers, width, ")
    assert refusal("lowvram.knobs.ckpt.KeepAll", every=1) == "model.every=1: must be removed: model knows no keys"


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("width", "x", "model.width='x': must be a whole number"),
        ("width", 3.5, "model.width=3.5: must be a whole number"),
        ("width", True, "model.width=true: must be a whole number"),
        ("width", None, "model.width=null: must be a whole number"),
        ("width", {"a": 1}, "model.width={'a': 1}: must be a whole number"),
        ("width", [1], "model.width=[1]: must be a whole number"),
        ("num_classes", "x", "model.num_classes='x': must be a whole number or null"),
        ("dropout", "x", "model.dropout='x': must be a number"),
        ("in_place", "perhaps", "model.in_place='perhaps': must be true or false"),
        ("layers", 3, "model.layers=3: must be a list of whole numbers"),
        ("layers", ["a"], "model.layers=['a']: must be a list of whole numbers"),
        ("block", "huge", "model.block='huge': must be one of basic, bottleneck"),
        ("norm", 3, "model.norm=3: must be one of batch, group, frozen"),
    ],
)
def test_a_wrong_type_is_refused_with_the_right_one(key: str, value: Any, sentence: str) -> None:
    assert refusal(**{key: value}) == sentence


@pytest.mark.parametrize(
    ("key", "values", "allowed"),
    [
        ("model.width", {"width": "???"}, "given a value: a whole number"),
        ("model.layers[1]", {"layers": [1, "???"]}, "given a value"),
    ],
)
def test_a_value_that_is_not_given_is_asked_for(key: str, values: dict[str, Any], allowed: str) -> None:
    assert refusal(**values) == f"{key}='???': must be {allowed}"


def test_a_field_without_a_default_is_asked_for() -> None:
    @dataclass(frozen=True)
    class Needy:
        path: str

    with pytest.raises(BadInput, match=r"data\.path='\?\?\?': must be given a value"):
        build_as(Needy, {}, "data")


@pytest.mark.parametrize("values", [{"num_classes": "None"}, {"layers": ["None"]}, {"a": {"b": "None"}}])
def test_pythons_none_is_refused(values: dict[str, Any]) -> None:
    assert "'None': must be null if nothing is meant" in refusal(**values)


@pytest.mark.parametrize("value", ["nan", float("nan")], ids=["text", "number"])
def test_nan_is_refused(value: Any) -> None:
    assert refusal(dropout=value) == "model.dropout=nan: must be at least 0 and less than 1"
    with pytest.raises(BadInput):
        require(True, "a.b", float("nan"), "anything")


def test_ranges_are_checked_by_the_class_itself() -> None:
    node = OmegaConf.create({"_target_": "lowvram.knobs.ckpt.RecomputeEvery", "every": 0})
    with pytest.raises(BadInput, match=r"ckpt\.every=0: must be at least 1"):
        build(node, "ckpt")
    with pytest.raises(BadInput, match=r"ckpt\.every=0: must be at least 1"):
        RecomputeEvery(0)


def test_text_may_look_like_something_else() -> None:
    assert built("lowvram.data.text.Text", path=5) == Text(path="5")
    assert built("lowvram.data.text.Text", path="~/a,b=c d.txt") == Text(path="~/a,b=c d.txt")


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "null"), (True, "true"), (False, "false"), ("a", "'a'"), (0.5, "0.5"), ([1], "[1]")]
)
def test_values_are_shown_as_they_are_typed(value: object, shown: str) -> None:
    error = BadInput("a.b", value, "something else")
    assert str(error) == f"a.b={shown}: must be something else"
    assert (error.key, error.value, error.allowed) == ("a.b", value, "something else")


class Colour(Enum):
    red = 1
    blue = 2


@dataclass(frozen=True)
class Everything:
    colour: Colour | None = None
    ratio: float | None = None
    sizes: list[int] = field(default_factory=list)


@pytest.mark.parametrize(
    ("name", "words"),
    [("colour", "one of red, blue or null"), ("ratio", "a number or null"), ("sizes", "a list of whole numbers")],
)
def test_types_are_reported_in_words(name: str, words: str) -> None:
    with pytest.raises(BadInput, match=rf"a\.{name}='!': must be {words}$"):
        build_as(Everything, {name: "!"}, "a")


def test_a_key_of_a_stranger_s_file_steers_no_terminal() -> None:
    error = BadInput("model.\u202egnp\x1b]0;x\x07\n", 1, "removed")
    assert str(error) == r"model.\u202egnp\x1b]0;x\x07\n=1: must be removed"
