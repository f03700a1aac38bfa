"""mode=prune as a loop, of models of transformers: what it writes and tells, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lowvram.compress.prune import Prune
from lowvram.config.errors import BadInput
from lowvram.config.transforms import ImportanceKind
from lowvram.core.assemble import assemble
from lowvram.data.source import Data
from lowvram.data.spec import DataSpec, Modality
from lowvram.knobs.adapter import NoAdapter
from lowvram.knobs.precision.bf16_pure import to_bf16
from lowvram.loops.export.folder import export, load
from lowvram.loops.export.plain import Origin
from lowvram.loops.session import Session
from lowvram.models import hf_widths
from lowvram.models.hf import HfConfig
from lowvram.models.hf_source import transformers
from lowvram.models.hf_widths import Check, Outcome
from lowvram.models.layout import dtypes_in
from lowvram.tasks import Auto
from tests.hugging import with_weights
from tests.laboratory import CPU
from tests.loops.sessions import PRUNE, Drawn, session_in

SPECS = {
    "llama:grouped": DataSpec(Modality.TOKENS, 200, (12,)),
    "gpt2": DataSpec(Modality.TOKENS, 200, (12,)),
    "phi3:fused": DataSpec(Modality.TOKENS, 200, (12,)),
    "vit": DataSpec(Modality.IMAGES, 5, (3, 16, 16)),
}


def session_of(folder: Path, config: HfConfig, spec: DataSpec, **options: Any) -> Session:
    session, problem = session_in(folder, "transformer", **options), Auto().pose(config, spec)
    data = Data(spec, Drawn(spec, 15), Drawn(spec, 10), "drawn")
    groups = {**session.settings.groups, "model": config}
    settings, rig = replace(session.settings, groups=groups), assemble(problem, session.knobs, CPU)
    return replace(session, settings=settings, problem=problem, rig=rig, data=data)


def trained(folder: Path, kind: str, *, in_16_bits: bool = False, **options: Any) -> Session:
    """A session that starts with the weights that a run has left in `before`, beside a tokenizer's file."""
    spec = SPECS[kind]
    first = session_of(folder, HfConfig(with_weights(kind)), spec, **options)
    if in_16_bits:
        to_bf16(first.rig.model)
    config = first.problem.model
    export(folder / "before", first.rig.model, Origin(config, spec, NoAdapter(), 0), merge=True)
    (folder / "before" / "tokenizer_config.json").write_text("{}")
    return session_of(folder, HfConfig(str(folder / "before")), spec, **options)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("kind", "importance"),
    [
        ("llama:grouped", ImportanceKind.taylor),
        ("gpt2", ImportanceKind.wanda),
        ("vit", ImportanceKind.magnitude),
    ],
)
def test_a_smaller_model_is_written(tmp_path: Path, kind: str, importance: ImportanceKind) -> None:
    session = trained(tmp_path, kind, prune=replace(PRUNE, importance=importance))
    before = contents(tmp_path / "before")
    row = Prune().run(session)
    figures, model = row["pruning"], load(tmp_path / "model")
    assert figures["parameters_before"] == sum(each.numel() for each in session.rig.model.parameters())
    assert figures["parameters_after"] == sum(each.numel() for each in model.parameters())
    assert figures["parameters_after"] == row["model"]["parameters"] < 0.9 * figures["parameters_before"]
    for when, folder in (("before", "before"), ("after", "model")):
        assert figures[f"file_{when}_bytes"] == (tmp_path / folder / "model.safetensors").stat().st_size
    assert figures["loss_after"] == row["loss"]["eval"] != figures["loss_before"]
    assert contents(tmp_path / "before") == before
    assert (tmp_path / "model" / "tokenizer_config.json").is_file()
    assert not list(tmp_path.glob(".*"))  # what is written beside is gone
    assert (figures["left"] is None) is (kind == "llama:grouped")
    large, small = (json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("before", "model"))
    sizes = {name for name in large.keys() | small.keys() if large.get(name) != small.get(name)}
    heads = {"num_attention_heads", "num_key_value_heads"}
    assert sizes == {"llama:grouped": {*heads, "intermediate_size"}, "gpt2": {"n_inner"}}.get(
        kind, {"intermediate_size"}
    )


def test_the_file_has_the_number_formats_of_the_old_one_under_other_names(tmp_path: Path) -> None:
    """transformers changes names as it reads and writes a ViT's file: the model's own aren't the file's."""
    session = trained(tmp_path, "vit", in_16_bits=True)
    Prune().run(session)
    before, after = (dtypes_in([tmp_path / folder / "model.safetensors"]) for folder in ("before", "model"))
    assert after == before
    assert not session.rig.model.state_dict().keys() <= before.keys()


def test_the_file_has_the_number_formats_of_the_old_one(tmp_path: Path) -> None:
    """Of a run with precision=bf16_pure: bf16. Nothing is rounded, and what was tied is written once."""
    Prune().run(trained(tmp_path, "llama:grouped", in_16_bits=True))
    before, after = (dtypes_in([tmp_path / folder / "model.safetensors"]) for folder in ("before", "model"))
    assert after == before
    assert set(after.values()) == {torch.bfloat16}
    assert "lm_head.weight" not in after
    whole, kept = (load(tmp_path / folder).state_dict() for folder in ("before", "model"))
    assert all(set(kept[name].flatten().tolist()) <= set(whole[name].flatten().tolist()) for name in kept)


def test_units_with_the_largest_weights_stay(tmp_path: Path) -> None:
    session = trained(tmp_path, "gpt2", prune=replace(PRUNE, round_to=1))
    state = session.rig.model.state_dict()
    Prune().run(session)
    small = load(tmp_path / "model").state_dict()
    layer = "transformer.h.1.mlp"
    # Weights of GPT-2's layers are (inputs, outputs).
    written, read = (state[f"{layer}.{name}.weight"].double() for name in ("c_fc", "c_proj"))
    norms = (written.square().sum(0) + read.square().sum(1)).sqrt()
    kept = norms.topk(32).indices.sort().values
    assert torch.equal(small[f"{layer}.c_fc.weight"], state[f"{layer}.c_fc.weight"][:, kept])
    assert torch.equal(small[f"{layer}.c_proj.weight"], state[f"{layer}.c_proj.weight"][kept])
    assert torch.equal(small[f"{layer}.c_fc.bias"], state[f"{layer}.c_fc.bias"][kept])


def test_shards_are_one_model(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    transformers.AutoModelForCausalLM.from_pretrained(with_weights("gpt2")).save_pretrained(
        folder, max_shard_size="20KB"
    )
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    assert len(sizes) > 1
    figures = Prune().run(session_of(tmp_path, HfConfig(str(folder)), SPECS["gpt2"]))["pruning"]
    assert figures["file_before_bytes"] == sum(sizes)


def test_a_model_that_computes_otherwise_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the units that really leave: others may have told nothing."""
    monkeypatch.setattr(
        hf_widths, "halves", lambda change, num: (change.dim, torch.arange(change.before).view(num, -1))
    )
    monkeypatch.setattr(Check, "proven", lambda self, candidates: Outcome(list(candidates), []))
    with pytest.raises(BadInput, match=r"^model='HfConfig': must be a model in which what leaves is the same as zeros"):
        Prune().run(trained(tmp_path, "phi3:fused"))
    assert not (tmp_path / "model").exists()


def test_refusals(tmp_path: Path) -> None:
    spec = SPECS["gpt2"]
    random = replace(HfConfig(with_weights("gpt2")), weights=type(HfConfig.weights).random)
    with pytest.raises(BadInput, match=r"^prune\.run=null: must be the folder of a finished run"):
        Prune().run(session_of(tmp_path, random, spec))
    same = replace(PRUNE, ratio=0.1, round_to=64)
    with pytest.raises(BadInput, match=r"^prune\.ratio=0\.1: must be larger, or prune\.round_to=64 smaller"):
        Prune().run(session_of(tmp_path, HfConfig(with_weights("gpt2")), spec, prune=same))
    unread = replace(PRUNE, run="outputs/run")
    with pytest.raises(BadInput, match=r"^prune\.run='outputs/run': must be typed on the command line beside mode="):
        Prune().run(session_of(tmp_path, HfConfig(with_weights("gpt2")), spec, prune=unread))
    assert not (tmp_path / "model").exists()
