"""Deeper models of transformers: which fields of their configurations count, and what the result computes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowvram.config.errors import BadInput
from lowvram.config.transforms import GrowthKind
from lowvram.models import hf_depths, hf_remade
from lowvram.models.growth import Grown, Source, copied_tensors, values_of
from lowvram.models.hf import HfConfig
from lowvram.models.hf_depths import candidates, find_depth, is_longer, lists_of
from lowvram.models.hf_source import transformers
from tests.hugging import with_weights
from tests.models.test_hf_widths import in_fp64, trained

pytestmark = pytest.mark.sampled(4)

STACK, INTERLEAVE, IDENTITY = GrowthKind.stack, GrowthKind.interleave, GrowthKind.identity
FOUR = {"num_hidden_layers": 4}
Layers = list[str]
# Of each: sizes, and by lists (and their blocks, if these differ) the layers that are zero in copies.
CASES: dict[str, tuple[dict[str, Any], Mapping[str, Layers | dict[int, Layers]]]] = {
    "llama:grouped": (FOUR, {"model.layers": ["self_attn.o_proj", "mlp.down_proj"]}),
    "phi3:fused": (FOUR, {"model.layers": ["self_attn.o_proj", "mlp.down_proj"]}),
    "smollm3:mixed": (
        {**FOUR, "no_rope_layers": [1, 1, 0, 0], "layer_types": 4 * ["full_attention"]},
        {"model.layers": ["self_attn.o_proj", "mlp.down_proj"]},
    ),
    "lfm2:mixed": (
        {**FOUR, "layer_types": ["conv", "conv", "full_attention", "full_attention"]},
        {"model.layers": {0: ["conv.out_proj", "feed_forward.w2"], 1: ["self_attn.out_proj", "feed_forward.w2"]}},
    ),
    "olmo2": (FOUR, {"model.layers": ["post_attention_layernorm", "post_feedforward_layernorm"]}),
    "gpt2": ({"n_layer": 6}, {"transformer.h": ["attn.c_proj", "mlp.c_proj"]}),
    "opt": (FOUR, {"model.decoder.layers": ["self_attn.out_proj", "fc2"]}),
    "t5:pairs": (
        {"num_layers": 4, "num_decoder_layers": 4},
        {
            "encoder.block": ["layer.0.SelfAttention.o", "layer.1.DenseReluDense.wo"],
            "decoder.block": ["layer.0.SelfAttention.o", "layer.1.EncDecAttention.o", "layer.2.DenseReluDense.wo"],
        },
    ),
}
LISTS = {"vit": "vit.layers", "bert": "bert.encoder.layer", "gpt_neox": "gpt_neox.layers", "mixtral:experts": ""}


def deeper(kind: str, how: GrowthKind, factor: int = 2) -> tuple[HfConfig, Any, Grown]:
    config = HfConfig(with_weights(kind))
    model = trained(config)
    return config, model, config.deeper(model, factor, how)


def made(model: nn.Module, spec: Any, grown: Grown) -> Any:
    """In fp64. Loads exactly the tensors that the deeper model has."""
    deep = grown.config.make(spec).double().eval()
    deep.load_state_dict(values_of(grown.tensors, model.state_dict()))
    return deep


@pytest.mark.sampled(10)
@pytest.mark.parametrize("kind", CASES)
def test_with_idle_blocks_a_model_computes_what_it_did(kind: str) -> None:
    config, (model, spec, inputs), grown = deeper(kind, IDENTITY)
    sizes, last = CASES[kind]
    assert grown.config.args == sizes
    zero = {name for name, each in grown.tensors.items() if each.is_zero}
    expected = {
        f"{name}.{2 * number + 1}.{layer}"
        for name, layers in last.items()
        for number in range(len(model.get_submodule(name)))
        for layer in (layers[number] if isinstance(layers, dict) else layers)
    }
    assert {name.rpartition(".")[0] for name in zero} == expected
    deep, few = made(model.double(), spec, grown), in_fp64(inputs())
    before, after = config.call(model, few), config.call(deep, few)
    assert (after - before).abs().max() <= 1e-12 * before.abs().max()
    after.square().sum().backward()
    assert all(deep.get_parameter(name).grad.any() for name in zero)  # they learn
    assert not [name for name, weight in deep.named_parameters() if weight.grad is None]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("how", [STACK, INTERLEAVE])
@pytest.mark.parametrize("kind", ["llama:grouped", "lfm2:mixed", "gpt2", "vit", "bert", "gpt_neox"])
def test_copied_blocks_compute_what_the_old_ones_do(kind: str, how: GrowthKind) -> None:
    config, (model, spec, inputs), grown = deeper(kind, how)
    deep, few = made(model.double(), spec, grown), in_fp64(inputs())
    name = LISTS.get(kind) or next(iter(CASES[kind][1]))
    blocks = list(model.get_submodule(name).children())
    order = [*blocks, *blocks] if how is STACK else [block for block in blocks for _ in range(2)]
    with torch.no_grad():
        found, whole = config.call(deep, few), config.call(model, few)
        model.config.update(grown.config.args)  # Llama calls as many layers as it says
        model.set_submodule(name, nn.ModuleList(order))
        assert found.equal(config.call(model, few))
    assert not found.equal(whole)


def test_three_times_as_many() -> None:
    assert deeper("gpt2", STACK, factor=3)[2].config.args == {"n_layer": 9}


@pytest.mark.slow
def test_a_decoder_of_one_block_gets_deeper_too() -> None:
    assert deeper("bart:unequal", STACK)[2].config.args == {"encoder_layers": 4, "decoder_layers": 2}


def test_a_model_that_would_not_run_its_new_blocks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_depths, "modules_that_run", lambda *_: ["transformer.h.0"])
    refused = r"^model\.name=.*; here stay blocks that a pass doesn't run if there are more"
    with pytest.raises(BadInput, match=refused):
        deeper("gpt2", STACK)
    monkeypatch.setattr(hf_depths, "modules_that_run", lambda *_: [][0])  # as a list that is too short would
    with pytest.raises(BadInput, match=refused):
        deeper("gpt2", STACK)


def test_an_encoder_and_its_decoder_both_get_deeper(tmp_path: Path) -> None:
    config, (model, spec, _), grown = deeper("bart", INTERLEAVE)
    assert grown.config.args == {"encoder_layers": 4, "decoder_layers": 4}
    deep = made(model, spec, grown)
    config.save(deep.float(), spec, tmp_path)
    alone = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert (alone.config.encoder_layers, alone.config.decoder_layers) == (4, 4)
    assert alone.generate(torch.arange(4, 12)[None], max_new_tokens=3, min_new_tokens=3).shape == (1, 4)


@pytest.mark.parametrize(
    ("kind", "how", "sentence"),
    [
        ("bert", IDENTITY, r"^grow\.how='identity': must be stack or interleave for this model: its blocks change"),
        ("mixtral:experts", IDENTITY, r"^grow\.how='identity': must be stack or interleave for this model: .*Double"),
        ("resnet", STACK, r"^model\.name=.*: must be a model whose configuration says how many blocks it has; here "),
        (
            "swin",
            STACK,
            r"^model\.name=.*; here stay 2 modules in swin\.encoder\.layers: no field of its ",
        ),
    ],
)
def test_what_can_not_be_grown_is_refused_in_a_sentence(kind: str, how: GrowthKind, sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        deeper(kind, how)


def test_layers_that_do_not_suffice_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all blocks were as the first one, and were not."""
    monkeypatch.setattr(hf_depths, "last_layers", lambda *_: {f"transformer.h.{n}": ["attn.c_proj"] for n in (0, 1, 2)})
    with pytest.raises(BadInput, match=r"^grow\.how='identity': must be stack or interleave for this model: what its"):
        deeper("gpt2", IDENTITY)


@pytest.mark.slow
def test_the_memory_of_the_proof_is_asked_for_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp64 as much as the model has; more for the deeper one where it has more than twice as many weights."""
    model: Any = trained(HfConfig(with_weights("gpt2"))).model
    weights, of_blocks = (sum(each.numel() for each in part.parameters()) for part in (model, model.transformer.h))
    for factor, needed in ((2, 8 * weights), (3, 4 * (weights + 2 * of_blocks))):
        monkeypatch.setattr(hf_remade, "free_host_bytes", lambda needed=needed: needed)
        assert deeper("gpt2", IDENTITY, factor)[2].tensors
        monkeypatch.setattr(hf_remade, "free_host_bytes", lambda needed=needed: needed - 1)
        with pytest.raises(BadInput, match=r"^model\.name=.*: must be a model small enough for the host's free memory"):
            deeper("gpt2", IDENTITY, factor)
    assert deeper("gpt2", STACK)[2].config.args == {"n_layer": 6}  # nothing is to be proven


def test_lists_of_blocks() -> None:
    model, block = nn.Module(), lambda: nn.Sequential(nn.ModuleList([nn.Sequential(nn.Linear(2, 2))]))
    model.encoder, model.decoder = nn.ModuleList([block(), block()]), nn.ModuleList([block()])
    model.layers, model.none, model.other = nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleList(), block()
    assert lists_of(model) == {"encoder": 2, "decoder": 1, "other.0": 1}


def test_fields_are_tried_alone_first() -> None:
    values = {"depth": 2, "heads": 2, "flag": True, "width": 8, "types": ["a", "b"], "ends": [1, 2], "names": ["x"]}
    copies = [Source(0, is_idle=False), Source(0, is_idle=True), Source(1, is_idle=False), Source(1, is_idle=True)]
    types, ends = {"types": ["a", "a", "b", "b"]}, {"ends": [1, 1, 2, 2]}
    assert list(candidates(values, 2, copies)) == [
        *({"depth": 4}, {"heads": 4}),
        *(types, {"depth": 4, **types}, {"heads": 4, **types}),
        *(ends, {"depth": 4, **ends}, {"heads": 4, **ends}),
        *(types | ends, {"depth": 4, **types, **ends}, {"heads": 4, **types, **ends}),
    ]


def test_lists_that_are_not_needed_stay() -> None:
    """Two are needed beside the number, so that all were tried."""
    model, lists = nn.Module(), {"types": ["a", "b"], "kinds": [0, 1], "ends": [7, 8]}
    model.layers = nn.ModuleList([nn.Sequential(nn.Linear(2, 2, bias=False)) for _ in range(2)])

    def shapes(sizes: Mapping[str, Any]) -> dict[str, tuple[int, ...]] | None:
        depth = sizes.get("depth", 2)
        fits = all(len(sizes.get(name, lists[name])) == depth for name in ("types", "kinds"))
        return {f"layers.{number}.0.weight": (2, 2) for number in range(depth)} if fits else None

    found = find_depth(model, {"depth": 2, **lists}, shapes, 2, INTERLEAVE)
    assert found.sizes == {"depth": 4, "types": ["a", "a", "b", "b"], "kinds": [0, 0, 1, 1]}
    assert (list(found.lists), found.gone, found.left) == (["layers"], set(), [])


def test_neither_flags_nor_fractions_are_numbers_of_blocks() -> None:
    assert list(candidates({"flag": True, "rate": 1.0, "depth": 1}, 1, 2 * [Source(0, is_idle=False)])) == [
        {"depth": 2}
    ]


def test_more_blocks_are_more_of_the_same() -> None:
    before = {"head": (8, 4), "layers.0.bias": (3,), "layers.0.up": (4, 4), "layers.1.up": (4, 4)}
    copies = [Source(number, is_idle=False) for number in (0, 1, 0, 1)]
    longer = {**before, "layers.2.up": (4, 4), "layers.3.up": (4, 4)}
    assert is_longer(before, "layers", copies, longer)  # a copy may lack what its block has
    others: list[dict[str, tuple[int, ...]]] = [
        before,
        {**longer, "layers.3.up": (4, 8)},
        {**longer, "head": (8, 8)},
        {**longer, "neck": (4, 4)},
        {**longer, "layers.3.bias": (3,)},  # its block, the second one, has none
        {name: shape for name, shape in longer.items() if name != "head"},
        {name: shape for name, shape in longer.items() if name != "layers.0.bias"},
    ]
    assert not [other for other in others if is_longer(before, "layers", copies, other)]
    assert not is_longer(before, "layers", copies, None)


def test_blocks_without_a_copy_are_as_before() -> None:
    names = ["head.weight", "layers.0.down.weight", "layers.1.down.weight", "layers.10.down.weight"]
    lists = {"layers": [Source(0, is_idle=False), Source(0, is_idle=True), Source(1, is_idle=False)]}
    found = copied_tensors(names, lists, {"layers.0": ["down"]})
    assert {name: tuple(each) for name, each in found.items()} == {
        "head.weight": ("head.weight", False),
        "layers.0.down.weight": ("layers.0.down.weight", False),
        "layers.1.down.weight": ("layers.0.down.weight", True),
        "layers.2.down.weight": ("layers.1.down.weight", False),
    }
