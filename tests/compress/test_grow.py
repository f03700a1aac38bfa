"""mode=grow as a loop: what it writes and tells; and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lowvram.compress.grow import Grow
from lowvram.config.errors import BadInput, Incompatible
from lowvram.config.transforms import GrowSettings, GrowthKind
from lowvram.loops.export.folder import load
from lowvram.loops.session import Session
from lowvram.models import hf_depths
from lowvram.models.layout import dtypes_in
from lowvram.models.resnet import BlockKind
from lowvram.tasks import Auto
from tests.compress.test_prune import trained
from tests.compress.test_prune_hf import trained as trained_of_transformers
from tests.laboratory import IMAGES, RESNET, knobs_of
from tests.loops.sessions import GROW, session_in


def to_grow(folder: Path, name: str, how: GrowthKind = GrowthKind.stack) -> Session:
    session = trained(folder, name)
    return replace(session, settings=replace(session.settings, grow=replace(GROW, how=how)))


@pytest.mark.sampled
@pytest.mark.parametrize("how", GrowthKind)
@pytest.mark.parametrize("name", ["transformer", "resnet"])
def test_a_deeper_model_is_written(tmp_path: Path, name: str, how: GrowthKind) -> None:
    session = to_grow(tmp_path, name, how)
    before = {path.name: path.read_bytes() for path in (tmp_path / "before").iterdir()}
    fields = Grow().run(session)
    figures, model = fields["growing"], load(tmp_path / "model")
    assert figures["parameters_before"] == sum(each.numel() for each in session.rig.model.parameters())
    assert figures["parameters_after"] == sum(each.numel() for each in model.parameters())
    assert figures["parameters_after"] == fields["model"]["parameters"] > figures["parameters_before"]
    assert figures["file_after_bytes"] == (tmp_path / "model" / "model.safetensors").stat().st_size
    assert figures["loss_after"] == fields["loss"]["eval"]
    is_same = abs(figures["loss_after"] - figures["loss_before"]) < 1e-6
    assert is_same is (how is GrowthKind.identity)
    assert {path.name: path.read_bytes() for path in (tmp_path / "before").iterdir()} == before


def test_copies_are_values_of_the_file(tmp_path: Path) -> None:
    Grow().run(to_grow(tmp_path, "transformer"))
    before, after = (load(tmp_path / folder).state_dict() for folder in ("before", "model"))
    for name in (name for name in before if "blocks" in name):
        number = int(name.split(".")[1])
        assert torch.equal(after[name.replace(f"blocks.{number}", f"blocks.{number + 3}", 1)], before[name])


@pytest.mark.parametrize("how", [GrowthKind.stack, GrowthKind.identity])
@pytest.mark.parametrize("name", ["transformer", "resnet"])
def test_the_file_has_the_number_formats_of_the_old_one(tmp_path: Path, name: str, how: GrowthKind) -> None:
    """Of a run with precision=bf16_pure: bf16, but for running statistics."""
    session = trained(tmp_path, name, in_16_bits=True)
    Grow().run(replace(session, settings=replace(session.settings, grow=replace(GROW, how=how))))
    before, after = (dtypes_in([tmp_path / folder / "model.safetensors"]) for folder in ("before", "model"))
    assert len(after) > len(before)
    inner = {name.split(".", 2)[-1]: dtype for name, dtype in before.items()}
    assert all(inner[name.split(".", 2)[-1]] is dtype for name, dtype in after.items())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", GrowthKind)
def test_a_deeper_model_of_transformers_is_written(
    tmp_path: Path, how: GrowthKind, capsys: pytest.CaptureFixture[str]
) -> None:
    session = trained_of_transformers(tmp_path, "llama:grouped", in_16_bits=True)
    fields = Grow().run(replace(session, settings=replace(session.settings, grow=replace(GROW, how=how))))
    figures, said = fields["growing"], json.loads((tmp_path / "model" / "config.json").read_text())
    assert said["num_hidden_layers"] == 4
    assert capsys.readouterr().out.splitlines()[-1] == f"grown by {how.name}: num_hidden_layers=4"
    assert figures["parameters_after"] == fields["model"]["parameters"] > figures["parameters_before"]
    assert figures["loss_after"] == fields["loss"]["eval"]
    assert figures["left"] is None
    assert (figures["loss_after"] == figures["loss_before"]) is (how is GrowthKind.identity)
    formats = dtypes_in([tmp_path / "model" / "model.safetensors"])
    assert set(formats.values()) == {torch.bfloat16}
    assert (tmp_path / "model" / "tokenizer_config.json").is_file()
    assert not list(tmp_path.glob(".*"))  # what is written beside is gone


def test_what_stays_as_it_is_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hf_depths, "lists_of", lambda _: {"model.layers": 2, "model.towers": 3})
    session = trained_of_transformers(tmp_path, "llama:grouped")
    left = Grow().run(replace(session, settings=replace(session.settings, grow=GROW)))["growing"]["left"]
    assert left == "3 modules in model.towers: no field of its configuration is their number and nothing else"
    assert capsys.readouterr().out.splitlines()[-1] == f"stays as it is: {left}"


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"^grow\.run=null: must be the folder of a finished run"):
        Grow().run(session_in(tmp_path, "transformer"))
    session = to_grow(tmp_path, "transformer")
    with pytest.raises(Incompatible, match=r"mode=grow takes the model as its file has it, so it needs depth=none"):
        Grow().run(replace(session, knobs=knobs_of(depth="layer_drop")))
    with pytest.raises(BadInput, match=r"^grow\.factor=1: must be at least 2"):
        GrowSettings(None, 1, GrowthKind.stack)
    narrow = Auto().pose(replace(RESNET, layers=[1, 1], block=BlockKind.bottleneck, init="run"), IMAGES)
    with pytest.raises(BadInput, match=r"^grow\.run='run': must be the folder of a model with a block that keeps"):
        Grow().run(replace(session, problem=narrow))
    assert not (tmp_path / "model").exists()
