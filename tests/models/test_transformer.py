"""The decoder Transformer: sizes, order, initial values, refusals, and what recomputing its blocks saves."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lowvram.config.errors import BadInput
from lowvram.config.schema import build
from lowvram.core.assemble import assemble
from lowvram.core.kind import Kind
from lowvram.core.ledger import ledger
from lowvram.core.seeds import generator_for
from lowvram.data.spec import DataSpec, Modality
from lowvram.models.attention import Rotary
from lowvram.models.transformer import Positions, Transformer, TransformerConfig
from lowvram.tasks import LanguageModelling

CONF = Path(__file__).parents[2] / "conf" / "model"
CPU = torch.device("cpu")
NUM_PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
}
SMALL = TransformerConfig(num_layers=2, width=24, num_heads=3, context=16)
BYTES = DataSpec(Modality.TOKENS, 256, (16,))


def preset(name: str) -> TransformerConfig:
    node = OmegaConf.load(CONF / f"{name}.yaml")
    assert isinstance(node, DictConfig)
    return build(node, "model")


def made(config: TransformerConfig, seed: int = 0, spec: DataSpec = BYTES) -> Transformer:
    """The model with its initial values, made as the framework makes it."""
    model = assemble(LanguageModelling().pose(config, spec), {}, CPU, seed).model
    assert isinstance(model, Transformer)
    return model


def random_tokens(num_samples: int = 2, length: int = 16, num_classes: int = 256) -> Tensor:
    return torch.randint(num_classes, (num_samples, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("name", "expected"), NUM_PARAMETERS.items())
def test_presets_have_the_papers_sizes(name: str, expected: int) -> None:
    config = preset(name)
    with torch.device("meta"):
        model = config.make(DataSpec(Modality.TOKENS, 256, (1024,)))
    assert sum(parameter.numel() for parameter in model.parameters()) == expected
    assert config.natural_shape() == (1024,)


def test_small_preset_is_the_default_and_follows_the_data() -> None:
    config = preset("transformer")
    assert config == TransformerConfig()
    model = made(config, spec=DataSpec(Modality.TOKENS, 300, config.natural_shape()))
    assert model.token_embedding.num_embeddings == model.head.out_features == 300


@pytest.mark.parametrize("name", ["transformer", *NUM_PARAMETERS])
def test_yaml_lists_every_field_with_a_comment(name: str) -> None:
    lines = (CONF / f"{name}.yaml").read_text().splitlines()
    fields = [line for line in lines if not line.startswith(("#", "_target_"))]
    names = [field.name for field in dataclasses.fields(TransformerConfig)]
    assert [line.split(":")[0] for line in fields] == names
    assert lines[0].startswith("# ")
    assert all("  # " in line for line in fields)


@pytest.mark.parametrize("positions", Positions)
def test_forward_gives_logits_for_every_position(positions: Positions) -> None:
    model = made(replace(SMALL, positions=positions))
    assert model(random_tokens()).shape == (2, 16, 256)
    assert model(random_tokens(length=5)).shape == (2, 5, 256)
    assert len(model.blocks) == 2


@pytest.mark.parametrize("positions", Positions)
def test_a_later_token_changes_nothing_before_it(positions: Positions) -> None:
    model = made(replace(SMALL, positions=positions))
    tokens_bt = random_tokens()
    changed_bt = tokens_bt.clone()
    changed_bt[:, 9] = (changed_bt[:, 9] + 1) % 256
    before, after = model(tokens_bt), model(changed_bt)
    torch.testing.assert_close(after[:, :9], before[:, :9])
    assert ((after[:, 9:] - before[:, 9:]).abs().amax(-1) > 1e-4).all()


@pytest.mark.parametrize("positions", Positions)
def test_the_order_of_earlier_tokens_matters(positions: Positions) -> None:
    model = made(replace(SMALL, positions=positions)).double()
    tokens_bt = random_tokens()
    swapped_bt = tokens_bt[:, [1, 0, *range(2, 16)]]
    assert (model(tokens_bt)[:, -1] - model(swapped_bt)[:, -1]).abs().max() > 1e-6


def test_tied_embeddings_are_one_tensor() -> None:
    tied, untied = made(SMALL), made(replace(SMALL, tied_embeddings=False))
    assert tied.head.weight is tied.token_embedding.weight
    assert "head.weight" not in dict(tied.named_parameters())
    assert untied.head.weight is not untied.token_embedding.weight
    assert not torch.equal(untied.head.weight, untied.token_embedding.weight)


def test_rotary_keeps_lengths_and_values_and_sees_only_distances() -> None:
    generator = torch.Generator().manual_seed(0)
    # The same query, key and value, of two heads each, at each of 12 positions.
    qkv_btnc = torch.randn(1, 1, 6, 8, generator=generator, dtype=torch.float64).expand(1, 12, 6, 8)
    turned_btnc = Rotary(num_value_heads=2)(qkv_btnc)
    torch.testing.assert_close(turned_btnc.norm(dim=-1), qkv_btnc.norm(dim=-1))
    assert torch.equal(turned_btnc[:, :, 4:], qkv_btnc[:, :, 4:])
    assert torch.equal(turned_btnc[:, 0], qkv_btnc[:, 0])
    q_nqc, k_nkc = turned_btnc[0, :, :2].transpose(0, 1), turned_btnc[0, :, 2:4].transpose(0, 1)
    scores_nqk = q_nqc @ k_nkc.transpose(1, 2)
    torch.testing.assert_close(scores_nqk[:, 1:, 1:], scores_nqk[:, :-1, :-1])
    assert (scores_nqk[:, 0, 1:] - scores_nqk[:, 0, :1]).abs().max() > 0.1


def test_rotary_adds_no_tensor() -> None:
    rotary, learned = made(SMALL), made(replace(SMALL, positions=Positions.learned))
    assert learned.state_dict().keys() - rotary.state_dict().keys() == {"position_embedding.weight"}
    assert not list(rotary.buffers())


def test_rotary_tells_far_positions_apart_in_bf16() -> None:
    same_btnc = torch.ones(1, 1024, 3, 4, dtype=torch.bfloat16)
    turned_tc = Rotary(num_value_heads=1)(same_btnc)[0, :, 0]
    assert turned_tc.dtype is torch.bfloat16
    assert (turned_tc[1023] - turned_tc[1022]).abs().max() > 0.1


def test_initial_values_are_those_of_gpt2() -> None:
    sizes: dict[str, Any] = {"num_layers": 8, "width": 64, "num_heads": 2, "context": 128}
    config = TransformerConfig(**sizes, positions=Positions.learned, tied_embeddings=False)
    model = made(config)
    for name, tensor in model.named_parameters():
        if name.endswith("bias"):
            assert tensor.eq(0).all(), name
        elif "norm" in name:
            assert tensor.eq(1).all(), name
        else:
            expected = 0.02 / 4 if name.endswith(("merge.weight", "down.weight")) else 0.02
            assert tensor.std().item() == pytest.approx(expected, rel=0.05), name
            assert abs(tensor.mean().item()) < 0.1 * expected, name


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    first, longer, other = made(SMALL), made(replace(SMALL, tied_embeddings=False)), made(SMALL, seed=1)
    for name, tensor in first.named_parameters():
        assert torch.equal(tensor, longer.get_parameter(name)), name
    for name, tensor in reversed(list(first.named_parameters())):
        again = torch.empty_like(tensor)
        first.initialise(name, again, generator_for(0, name, CPU))
        assert torch.equal(tensor, again), name
    assert not torch.equal(first.head.weight, other.head.weight)
    up, next_up = (first.get_parameter(f"blocks.{index}.mlp.up.weight") for index in range(2))
    assert not torch.equal(up, next_up)


def test_a_foreign_tensor_is_not_initialised() -> None:
    with pytest.raises(KeyError, match=r"blocks\.0\.mlp\.gate\.weight"):
        made(SMALL).initialise("blocks.0.mlp.gate.weight", torch.empty(3), torch.Generator())


def test_dropout_acts_in_training_only() -> None:
    model, plain = made(replace(SMALL, dropout=0.5)), made(SMALL)
    tokens_bt = random_tokens()
    assert not torch.equal(model(tokens_bt), model(tokens_bt))
    torch.testing.assert_close(model.eval()(tokens_bt), plain(tokens_bt))


def test_attention_is_dropped_too() -> None:
    attention = made(replace(SMALL, dropout=0.5)).blocks[0].get_submodule("attention")
    x_btd = torch.randn(2, 16, 24)
    assert not torch.equal(attention(x_btd), attention(x_btd))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_layers": 0}, "model.num_layers=0: must be a positive number"),
        ({"width": -1}, "model.width=-1: must be a positive number"),
        ({"num_heads": 0}, "model.num_heads=0: must be a positive number"),
        ({"context": 0}, "model.context=0: must be a positive number"),
        ({"vocab_size": 0}, "model.vocab_size=0: must be a positive number, or null"),
        ({"dropout": 1.0}, "model.dropout=1.0: must be at least 0 and less than 1"),
        ({"dropout": -0.1}, "model.dropout=-0.1: must be at least 0 and less than 1"),
        ({"dropout": float("nan")}, "model.dropout=nan: must be at least 0 and less than 1"),
        ({"num_heads": 5}, "model.num_heads=5: must be a divisor of model.width=24"),
        ({"num_kv_heads": 0}, "model.num_kv_heads=0: must be a positive number, or null"),
        ({"num_kv_heads": 2}, "model.num_kv_heads=2: must be a divisor of model.num_heads=3"),
        ({"num_kv_heads": 6}, "model.num_kv_heads=6: must be a divisor of model.num_heads=3"),
        ({"num_distinct_layers": -1}, "model.num_distinct_layers=-1: must be a positive number, or null"),
        ({"num_distinct_layers": 3}, "model.num_distinct_layers=3: must be at most model.num_layers=2"),
        ({"embedding_width": 0}, "model.embedding_width=0: must be a positive number, or null"),
        ({"num_heads": 8}, "model.positions='rotary': must be learned where model.width / model.num_heads"),
    ],
)
def test_values_out_of_range_are_named(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadInput) as caught:
        replace(SMALL, **changes)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("spec", "key", "words"),
    [
        (DataSpec(Modality.TOKENS, 256, (17,)), "data.sequence_length", ["=17:", "model.context=16"]),
        (DataSpec(Modality.TOKENS, 300, (16,)), "model.vocab_size", ["=256:", "at least 300"]),
        (DataSpec(Modality.IMAGES, 10, (3, 8, 8)), "data", ["'images'", "a source of tokens"]),
    ],
)
def test_data_that_do_not_fit_are_refused(spec: DataSpec, key: str, words: list[str]) -> None:
    with pytest.raises(BadInput) as caught:
        replace(SMALL, vocab_size=256).make(spec)
    assert caught.value.key == key
    assert all(word in str(caught.value) for word in words)


def test_a_pinned_vocabulary_may_be_larger_than_the_data_needs() -> None:
    assert made(replace(SMALL, vocab_size=999)).head.out_features == 999


def activation_bytes(config: TransformerConfig, recomputes: bool) -> int:
    """The most that activations take in a forward and backward pass over 8 samples."""
    model = made(config, spec=DataSpec(Modality.TOKENS, 256, config.natural_shape()))
    tokens_bt = random_tokens(8, *config.natural_shape())
    for block in model.blocks if recomputes else []:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    with ledger(model, inputs=tokens_bt) as peak:
        F.cross_entropy(model(tokens_bt).flatten(0, 1), tokens_bt.flatten()).backward()
    return peak.by_kind_max[Kind.ACTIVATIONS]


def test_recomputing_every_block_halves_the_activations_of_the_small_preset() -> None:
    config = preset("transformer")
    kept_bytes, recomputed_bytes = (activation_bytes(config, recomputes) for recomputes in (False, True))
    assert recomputed_bytes <= 0.5 * kept_bytes
