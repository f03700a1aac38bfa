"""Loading an export: its bytes are looked at, and no code runs that the caller didn't name."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from lowvram.config.errors import BadInput
from lowvram.config.registry import node_of, options_of
from lowvram.config.schema import find_target
from lowvram.data.spec import DataSpec, Modality
from lowvram.knobs.adapter import Lora, NoAdapter
from lowvram.loops.export.folder import export, load
from lowvram.loops.export.plain import Origin, built
from lowvram.models.external import ExternalConfig
from lowvram.models.hf import HfConfig
from lowvram.models.layout import target_of
from lowvram.models.transformer import TransformerConfig
from lowvram.results.files import manifest
from tests.config.test_yaml import GIVEN
from tests.hugging import tiny

TOKENS = DataSpec(Modality.TOKENS, 11, (8,), 11)
NUMBERS = DataSpec(Modality.IMAGES, 2, (1, 2, 2))
TINY = TransformerConfig(num_layers=1, num_heads=1, width=8)
FLIPS = 40
UNCHECKED = "files.json is missing"
GROUPS = ("model", "adapter")


def exported(folder: Path, config: Any = TINY, spec: DataSpec = TOKENS) -> nn.Module:
    model = (config.build if isinstance(config, ExternalConfig) else config.make)(spec)
    export(folder, model, Origin(config, spec, NoAdapter(), 0), merge=True)
    return model


def same(found: nn.Module, wanted: nn.Module) -> bool:
    here, there = found.state_dict(), wanted.state_dict()
    return here.keys() == there.keys() and all(torch.equal(here[name], there[name]) for name in there)


def rewritten(folder: Path, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    """As somebody would who wants harm: there is no list of hashes any more."""
    values = json.loads((folder / name).read_text())
    change(values)
    (folder / name).write_text(json.dumps(values))
    (folder / manifest.NAME).unlink()


# Code


def line() -> nn.Module:
    return nn.Linear(4, 2)


@pytest.fixture
def own(tmp_path: Path) -> tuple[Path, nn.Module]:
    return tmp_path / "model", exported(tmp_path / "model", ExternalConfig(f"{__name__}.line"), NUMBERS)


def test_code_that_the_caller_has_not_named_is_never_imported(
    own: tuple[Path, nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trap.py").write_text("from pathlib import Path; Path('sprung').touch()\ndef make(): pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    rewritten(own[0], "config.json", lambda values: values["model"].update(target="trap.make"))
    ways = r"load\(folder, model=make\), or load\(folder, trust=\{'trap\.make'\}\)"
    for trust in ([], {"trap"}, {"make"}, {"trap.make.more"}, "trap.maker"):
        with (
            pytest.warns(UserWarning, match=UNCHECKED),
            pytest.raises(BadInput, match=rf"^model\.target='trap\.make': must be named by you, .*: {ways}$"),
        ):
            load(own[0], trust=trust)
    assert not (tmp_path / "sprung").exists()
    assert "trap" not in sys.modules


def test_code_that_the_caller_names_makes_the_model(own: tuple[Path, nn.Module]) -> None:
    folder, model = own
    assert same(load(folder, model=line), model)
    assert same(load(folder, trust={f"{__name__}.line"}), model)
    assert same(load(folder, trust=f"{__name__}.line"), model)


def test_code_is_named_for_what_was_trained_apart_too(tmp_path: Path) -> None:
    class Net(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Flatten(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))

    config, adapter = ExternalConfig("somewhere.Net"), Lora(rank=2, targets=["1"])
    export(tmp_path / "model", lora_model(Net, config, adapter), Origin(config, NUMBERS, adapter, 0), merge=False)
    with pytest.raises(BadInput, match=r"^model\.target='somewhere\.Net': must be named by you"):
        load(tmp_path / "model")
    assert load(tmp_path / "model", model=Net)(torch.ones(1, 1, 2, 2)).shape == (1, 2)


def lora_model(maker: Callable[..., nn.Module], config: ExternalConfig, adapter: Lora) -> nn.Module:
    from lowvram.core.assemble import assemble
    from lowvram.models.external import HandedOver
    from lowvram.tasks import Auto

    task = Auto().pose(HandedOver(**vars(config), maker=maker), NUMBERS)
    return assemble(task, {"adapter": adapter}, torch.device("cpu"), 0).model


def test_only_our_models_and_adapters_are_named_by_their_classes(tmp_path: Path) -> None:
    exported(tmp_path / "model")
    for target in ("lowvram.config.settings.RootSettings", "subprocess.getoutput", None, ["x"]):
        exported(tmp_path / str(target))
        rewritten(
            tmp_path / str(target), "config.json", lambda values, name=target: values["model"].update(_target_=name)
        )
        with (
            pytest.warns(UserWarning, match=UNCHECKED),
            pytest.raises(BadInput, match=r"^model\._target_=.*: must be the class of an option: external, gpt2, "),
        ):
            load(tmp_path / str(target))


@pytest.mark.parametrize(("group", "option"), [(group, option) for group in GROUPS for option in options_of(group)])
def test_the_class_of_an_option_is_named(group: str, option: str) -> None:
    node = node_of(group, option)
    cls = find_target(group, node["_target_"])
    values = OmegaConf.to_container(OmegaConf.merge(node, GIVEN.get((group, option), {}), {"_target_": target_of(cls)}))
    assert type(built({group: values}, group)) is cls


def test_values_are_not_worked_out(tmp_path: Path) -> None:
    exported(tmp_path / "model")
    rewritten(tmp_path / "model", "config.json", lambda values: values["model"].update(width="${oc.env:WIDTH}"))
    with (
        pytest.warns(UserWarning, match=UNCHECKED),
        pytest.raises(BadInput, match=r"an exported model: its config\.json isn't one's"),
    ):
        load(tmp_path / "model")


def test_of_transformers_models_alone_are_made(tmp_path: Path) -> None:
    spec = DataSpec(Modality.TOKENS, 300, (8,), 300)
    model = exported(tmp_path / "model", HfConfig(tiny("gpt2")), spec)
    assert same(load(tmp_path / "model"), model)
    with pytest.raises(BadInput, match=r"^model=.*: must be left out"):
        load(tmp_path / "model", model=line)
    (tmp_path / "model" / manifest.NAME).unlink()
    for name in ("AutoModelForCausalLM", "pipeline", "utils", "GPT2Config", "Nothing", "__file__", None):
        told = json.loads((tmp_path / "model" / "config.json").read_text()) | {"architectures": name and [name]}
        (tmp_path / "model" / "config.json").write_text(json.dumps(told))
        with (
            pytest.warns(UserWarning, match=UNCHECKED),
            pytest.raises(BadInput, match=r"^architectures=.*a model's class in transformers"),
        ):
            load(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(told | {"auto_map": {"AutoModel": "x.Y"}}))
    with pytest.warns(UserWarning, match=UNCHECKED), pytest.raises(BadInput, match=r"which lowvram never runs"):
        load(tmp_path / "model")


# Bytes


def test_a_flipped_bit_is_reported_with_its_file(tmp_path: Path) -> None:
    model = exported(tmp_path / "model")
    for path in sorted((tmp_path / "model").iterdir()):
        sound = path.read_bytes()
        for place in random.Random(0).sample(range(len(sound)), FLIPS):
            flipped = bytearray(sound)
            flipped[place] ^= 1 << place % 8
            path.write_bytes(flipped)
            check_noticed(path, model)
        path.write_bytes(sound)
    assert same(load(tmp_path / "model"), model)


def check_noticed(path: Path, model: nn.Module) -> None:
    """A flip in the list may be told of what it lists, or change nothing."""
    if path.name != manifest.NAME:
        with pytest.raises(BadInput, match=rf"as it was exported: {path.name} is damaged"):
            load(path.parent)
        return
    with suppress(BadInput):
        assert same(load(path.parent), model)


def test_an_export_of_an_early_version_loads_with_a_warning(tmp_path: Path) -> None:
    model = exported(tmp_path / "model")
    (tmp_path / "model" / manifest.NAME).unlink()
    with pytest.warns(UserWarning, match=r"files\.json is missing: the files beside it can't be verified"):
        assert same(load(tmp_path / "model"), model)


def test_what_is_no_export_is_reported(tmp_path: Path) -> None:
    with (
        pytest.warns(UserWarning, match=UNCHECKED),
        pytest.raises(BadInput, match=r"an exported model, whose config\.json can be read"),
    ):
        load(tmp_path)


@pytest.mark.parametrize(
    "wrong", [{"modality": {}}, {"modality": "SOUNDS"}, {"shape": 5}, {"num_classes": []}, {"layout": 1}]
)
def test_damaged_words_about_the_data_are_reported(tmp_path: Path, wrong: dict[str, Any]) -> None:
    """Where nothing says that they were changed."""
    exported(tmp_path / "model")
    rewritten(tmp_path / "model", "config.json", lambda values: values["data"].update(wrong))
    with pytest.warns(UserWarning, match=UNCHECKED), pytest.raises(BadInput):
        load(tmp_path / "model")


def test_an_export_of_another_kind_replaces_ours_alone(tmp_path: Path) -> None:
    exported(tmp_path / "model")
    (tmp_path / "model" / "README.md").write_text("mine")
    exported(tmp_path / "model", HfConfig(tiny("gpt2")), DataSpec(Modality.TOKENS, 300, (8,), 300))
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"README.md", "config.json", "model.safetensors", manifest.NAME} <= names
