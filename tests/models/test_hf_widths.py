"""Smaller models of transformers: which fields of their configurations count, and that what leaves is the same as zeros
in its place."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowvram.compat.torch_trees import tree_map_only
from lowvram.config.errors import BadInput
from lowvram.core.assemble import assemble
from lowvram.data.spec import DataSpec, Modality, pairs_layout
from lowvram.models import hf_remade, hf_widths
from lowvram.models.hf import HfConfig, Weights
from lowvram.models.hf_heads import Head
from lowvram.models.hf_widths import Change, Found, agree, different_units, grouped
from lowvram.models.remade import Trained
from lowvram.models.widths import InnerWidth, Pruned, Slices, sliced
from lowvram.tasks import Auto
from tests.hugging import tiny, with_weights
from tests.laboratory import CPU, knobs_of, make_batch, peak_as_measured, peak_as_planned
from tests.models.test_widths import zeroed

pytestmark = pytest.mark.sampled(4)

NO_SIZE = "attention heads: its configuration has no field for the size of one"
HALVED_OF_GPT2 = ("c_fc.weight", "c_fc.bias", "mlp.c_proj.weight")
TWO_OF_FOUR = {"num_attention_heads": 2, "num_key_value_heads": 1}
CASES: dict[str, dict[str, int]] = {  # what is smaller in the configuration of each
    "llama:grouped": {**TWO_OF_FOUR, "head_dim": 8, "intermediate_size": 24},
    "mistral:grouped": {**TWO_OF_FOUR, "head_dim": 12, "intermediate_size": 24},
    "qwen3:grouped": {**TWO_OF_FOUR, "head_dim": 8, "intermediate_size": 24},
    "gemma:grouped": {**TWO_OF_FOUR, "head_dim": 8, "intermediate_size": 24},
    "phi3:fused": {"intermediate_size": 24},
    "gpt2": {"n_inner": 32},
    "opt": {"ffn_dim": 16},
    "gpt_neox": {"intermediate_size": 16},
    "bert:masked": {"intermediate_size": 16},
    "bert": {"intermediate_size": 16},
    "distilbert:masked": {"hidden_dim": 16},
    "vit": {"intermediate_size": 16},
    "t5:pairs": {"d_ff": 16},
    "t5": {"d_ff": 16},
    "bart": {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16},
}


def spec_of(config: HfConfig) -> DataSpec:
    match config.modality:
        case Modality.IMAGES:
            return DataSpec(Modality.IMAGES, 5, config.natural_shape())
        case Modality.PAIRS:
            return DataSpec(Modality.PAIRS, 200, (12,), layout=pairs_layout(12, 8))
        case Modality.LABELLED_TOKENS:
            return DataSpec(Modality.LABELLED_TOKENS, 5, (12,), vocab_size=200)
        case modality:
            return DataSpec(modality, 200, (12,))


def trained(config: HfConfig) -> Trained:
    """A model in which every value counts, those of biases and norms too."""
    spec, draw = spec_of(config), torch.Generator().manual_seed(0)
    model = assemble(Auto().pose(config, spec), knobs_of(), CPU).model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=draw))
    return Trained(model, spec, lambda: make_batch(spec, 3).inputs)


def pruned(kind: str, ratio: float = 0.5, multiple: int = 4) -> tuple[HfConfig, Trained, Pruned]:
    config = HfConfig(with_weights(kind))
    model = trained(config)
    return config, model, config.smaller(model, ratio, multiple)


def in_fp64(inputs: Any) -> Any:
    return tree_map_only(Tensor, lambda each: each.double() if each.is_floating_point() else each, inputs)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", CASES)
def test_sliced_and_masked_models_agree(kind: str) -> None:
    config, (model, spec, inputs), smaller = pruned(kind)
    assert smaller.config.args == CASES[kind]
    assert smaller.is_smaller
    draw = torch.Generator().manual_seed(1)
    pairs = zip(smaller.widths, smaller.numbers, strict=True)
    kept = [torch.randperm(width.num_units, generator=draw)[:number] for width, number in pairs]
    state, few = {name: in_fp64(tensor.clone()) for name, tensor in model.state_dict().items()}, in_fp64(inputs())
    small, large = smaller.config.make(spec).double().eval(), model.double()
    with torch.no_grad():
        whole = config.call(large, few)
        large.load_state_dict(zeroed(state, smaller.widths, kept))
        masked = config.call(large, few)
        small.load_state_dict(sliced(state, smaller.widths, kept))
        ours = config.call(small, few)
    assert (ours - masked).abs().max() <= 1e-12 * masked.abs().max()
    assert (whole - masked).abs().max() > 1e-3 * masked.abs().max()  # what has left was used
    assert config.description != smaller.config.description


@pytest.mark.slow
def test_what_stays_is_told() -> None:
    assert pruned("gpt2")[2].left == [NO_SIZE]
    assert pruned("llama:grouped")[2].left == []
    why = "without some, the model isn't the one with zeros in their place"  # all blocks share biases of one
    assert pruned("t5:pairs")[2].left == [f"attention heads (num_heads, d_kv): {why}"]
    one_group = "attention heads (num_attention_heads): none leaves of 1 in each"
    assert pruned("llama")[2].left == [one_group]


def test_the_nearest_number_of_heads_is_taken_that_the_configuration_allows() -> None:
    """Llama's number of heads must divide its width, 32: of 8 stay 4, not 3."""
    sizes = pruned("llama:many", ratio=0.6)[2].config.args
    assert sizes == {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 4, "intermediate_size": 20}


def test_the_memory_of_the_proof_is_asked_for_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp64: all weights, and half of each layer of the MLPs whose width is halved, but the second layers' biases."""
    model = trained(HfConfig(with_weights("gpt2"))).model
    weights = sum(each.numel() for each in model.parameters())
    halved = sum(each.numel() for name, each in model.state_dict().items() if name.endswith(HALVED_OF_GPT2))
    needed = 8 * (weights + halved // 2)
    monkeypatch.setattr(hf_remade, "free_host_bytes", lambda: needed)
    assert pruned("gpt2")[2].is_smaller
    monkeypatch.setattr(hf_remade, "free_host_bytes", lambda: needed - 1)
    with pytest.raises(
        BadInput, match=r"^model\.name=.*: must be a model small enough for the host's free memory, 0\.14"
    ):
        pruned("gpt2")


def test_nothing_leaves_at_a_ratio_of_0() -> None:
    config, _, smaller = pruned("llama:grouped", ratio=0.0)
    assert (smaller.widths, smaller.is_smaller) == ([], False)
    assert config.changes(smaller.config) == ""


def mixed_up(change: Change, num_units: int) -> tuple[int, Tensor]:
    """Places of the gate of one unit and of the other half of another."""
    places = torch.arange(change.before).view(-1, num_units).T.clone()
    places[:, -1] = places[:, -1].roll(1)
    return change.dim, places


def scattered(change: Change, num_units: int) -> tuple[int, Tensor]:
    """Places of heads as if their features alternated."""
    return change.dim, torch.arange(change.before).view(-1, num_units).T


def test_wrong_places_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_widths, "halves", mixed_up)
    with pytest.raises(BadInput, match=r"features inside blocks \(intermediate_size\): without some, the model isn't"):
        pruned("phi3:fused")
    monkeypatch.undo()
    monkeypatch.setattr(hf_widths, "in_a_row", scattered)
    smaller = pruned("llama:grouped")[2]
    assert smaller.config.args == {"intermediate_size": 24}
    assert smaller.left[0].startswith("attention heads (num_attention_heads, num_key_value_heads, head_dim): without")


def test_no_width_keeps_the_units_of_the_one_before() -> None:
    """Of two heads in two layers, equal draws would hide that the layers share a bias of each head."""
    one = Slices("a.weight", 0, torch.arange(2)[:, None])
    width = InnerWidth((one,), one)
    found = [Found("heads", 2, 1, {}, [width] * 6), Found("features", 24, 12, {}, [width] * 3)]
    kept = [set(units.tolist()) for units in different_units(found)]
    assert [len(units) for units in kept] == [1] * 6 + [12] * 3
    assert all(one != other for one, other in pairwise(kept))


def test_models_are_the_same_in_proportion_to_what_the_units_do() -> None:
    """Where a block scales what it adds by 1e-6, units that are mixed up change as little."""
    theirs, effect, nearly = torch.ones(4), 1e-6 * torch.ones(4), 1e-7 * torch.ones(4)
    theirs, effect, nearly = theirs.double(), effect.double(), nearly.double()
    assert not agree(theirs + nearly, theirs, theirs + effect)
    assert agree(theirs + 1e-5 * effect, theirs, theirs + effect)
    assert agree(theirs + 1e-13, theirs, theirs)
    assert not agree(theirs * torch.nan, theirs, theirs + effect)


def test_a_layer_goes_with_what_writes_nearest_to_it() -> None:
    model = torch.nn.Module()
    model.a, model.b = (torch.nn.ModuleDict({"up": torch.nn.Linear(2, 4), "down": torch.nn.Linear(4, 2)}) for _ in "ab")
    one = torch.arange(4)[:, None]

    def parts(*names: str) -> dict[str, Slices]:
        return {name: Slices(name, int("down" in name), one) for name in names}

    widths = grouped(model, parts("a.up.weight", "a.up.bias", "b.up.weight", "a.down.weight", "b.down.weight"))
    found = [([each.name for each in width.writers], width.layer) for width in widths]
    assert found == [(["a.up.weight", "a.up.bias"], "a.down"), (["b.up.weight"], "b.down")]
    assert not grouped(model, parts("a.up.weight", "a.down.weight", "b.down.weight"))  # nothing writes for one
    assert not grouped(model, parts("a.up.weight"))  # nothing reads it


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (
            "mixtral:experts",
            r"^model\.name=.*: must be a model inside whose blocks something can leave; .*MLPs: no field",
        ),
        ("swin", r"^model\.name=.*; here stay MLPs: no field of its configuration is their width"),
    ],
)
def test_what_can_not_be_pruned_is_refused_in_a_sentence(kind: str, sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        pruned(kind)


def test_a_head_that_starts_anew_is_refused() -> None:
    config = HfConfig(with_weights("bert"), head=Head.masked_lm)
    with pytest.raises(BadInput, match=r"^model\.head='masked_lm': must be the one that the model was trained with"):
        config.smaller(trained(config), 0.5, 4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama:grouped", "vit"])
def test_the_planner_prices_the_smaller_model(kind: str) -> None:
    config, (_, spec, _), smaller = pruned(kind)
    whole, small = (
        Auto().pose(replace(each, name=tiny(kind), weights=Weights.random), spec) for each in (config, smaller.config)
    )
    knobs = knobs_of()
    measured, planned = peak_as_measured(small, knobs, 4), peak_as_planned(small, knobs, 4)
    assert planned.peak_bytes == measured.peak_bytes < peak_as_planned(whole, knobs, 4).peak_bytes


ALONE = """
import json, sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
assert "lowvram" not in sys.modules
print(json.dumps(model(torch.arange(8)[None]).logits.double().sum().item()))
"""


@pytest.mark.slow  # imports transformers in another process
def test_transformers_alone_loads_the_folder(tmp_path: Path) -> None:
    config, (model, spec, _), smaller = pruned("llama:grouped")
    kept = [torch.arange(number) for number in smaller.numbers]
    small = smaller.config.make(spec).eval()
    small.load_state_dict(sliced(model.state_dict(), smaller.widths, kept))
    smaller.config.save(small, spec, tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    assert {name: said[name] for name in CASES["llama:grouped"]} == CASES["llama:grouped"]
    ran = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    with torch.no_grad():
        expected = config.call(small, torch.arange(8)[None]).double().sum().item()
    assert json.loads(ran.stdout.splitlines()[-1]) == pytest.approx(expected, rel=1e-6)
