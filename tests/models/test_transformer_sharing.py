"""What makes a Transformer smaller: fewer heads of keys, factorised embeddings, layers that share their weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowvram.core.assemble import assemble
from lowvram.core.step import step
from lowvram.data.spec import DataSpec, Modality
from lowvram.knobs.ckpt import RecomputeEvery
from lowvram.knobs.logits import ChunkedLogits
from lowvram.models import transformer
from lowvram.models.attention import grouped_attention
from lowvram.models.transformer import Positions, Transformer, TransformerConfig
from lowvram.tasks import Auto, Problem
from lowvram.worker.mfu import model_flops
from tests.laboratory import CPU, TOKENS, InDouble, knobs_of, make_batch, relative_error, train

SMALL = TransformerConfig(num_layers=4, width=24, num_heads=6, context=16)
GPT2 = TransformerConfig(12, 768, 12, context=1024, positions=Positions.learned, vocab_size=50257)
SAVERS: dict[str, dict[str, Any]] = {
    "grouped": {"num_kv_heads": 2},
    "multi_query": {"num_kv_heads": 1},
    "factorised": {"embedding_width": 8},
    "factorised_untied": {"embedding_width": 8, "tied_embeddings": False},
    "shared": {"num_distinct_layers": 2},
    "one_layer": {"num_distinct_layers": 1},
    "all": {"num_kv_heads": 3, "embedding_width": 8, "num_distinct_layers": 3},
}


def problem(**changes: Any) -> Problem:
    return Auto().pose(replace(SMALL, context=8, **changes), TOKENS)


def made(**changes: Any) -> Transformer:
    model = assemble(Auto().pose(replace(SMALL, **changes), DataSpec(Modality.TOKENS, 64, (16,))), {}, CPU).model
    assert isinstance(model, Transformer)
    return model


def num_parameters(config: TransformerConfig) -> int:
    with torch.device("meta"):
        model = config.make(DataSpec(Modality.TOKENS, 256, (1024,)))
    return sum(parameter.numel() for parameter in model.parameters())


BLOCK = 12 * 768**2 + 13 * 768  # weights and biases of qkv, merge, up, down; two norms
REST = 1024 * 768 + 2 * 768  # positions, the last norm


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 12 * BLOCK + REST + 50257 * 768),
        ({"num_kv_heads": 4}, 12 * (BLOCK - 2 * 8 * 64 * 769) + REST + 50257 * 768),
        ({"num_kv_heads": 1}, 12 * (BLOCK - 2 * 11 * 64 * 769) + REST + 50257 * 768),
        ({"num_distinct_layers": 1}, BLOCK + REST + 50257 * 768),
        ({"num_distinct_layers": 5}, 5 * BLOCK + REST + 50257 * 768),
        ({"embedding_width": 128}, 12 * BLOCK + REST + (50257 + 768) * 128),
        ({"embedding_width": 128, "tied_embeddings": False}, 12 * BLOCK + REST + 2 * (50257 + 768) * 128),
        ({"num_distinct_layers": 1, "embedding_width": 128}, BLOCK + REST + (50257 + 768) * 128),
    ],
)
def test_sizes_are_what_the_arithmetic_says(changes: dict[str, Any], expected: int) -> None:
    assert num_parameters(replace(GPT2, **changes)) == expected


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SAVERS)
def test_it_trains_like_any_other_with_recomputation_and_chunks(name: str) -> None:
    task = InDouble(problem(**SAVERS[name]))
    knobs = knobs_of(ckpt=RecomputeEvery(1), logits=ChunkedLogits(7), optimizer="sgd", accum="x2")
    found, wanted = (train(task, each, [4, 3], lr=0.1) for each in (knobs, knobs_of(optimizer="sgd")))
    assert relative_error(found.gradients, wanted.gradients) <= 1e-12
    assert all(gradient.any() for gradient in wanted.gradients.values())


@pytest.mark.parametrize("name", SAVERS)
def test_names_of_what_stays_and_initial_values_stay(name: str) -> None:
    """A tensor that keeps its shape keeps its value."""
    plain, other = made().state_dict(), made(**SAVERS[name]).state_dict()
    assert other.keys() - plain.keys() <= {"widen.weight", "narrow.weight"}
    alike = [name for name in other if name in plain and other[name].shape == plain[name].shape]
    assert alike
    assert all(torch.equal(other[name], plain[name]) for name in alike)


# Grouped-query attention


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3])
@pytest.mark.parametrize("positions", Positions)
def test_few_heads_are_many_that_repeat(num_kv_heads: int, positions: Positions) -> None:
    """The same numbers as a model of six heads whose keys and values are copies."""
    few = made(num_kv_heads=num_kv_heads, positions=positions).double()
    many = made(positions=positions).double()
    weights: dict[str, Tensor] = dict(few.state_dict())
    for name in [name for name in weights if ".qkv." in name]:
        query, key, value = weights[name].split([24, num_kv_heads * 4, num_kv_heads * 4])
        key, value = (
            each.unflatten(0, (num_kv_heads, 4)).repeat_interleave(6 // num_kv_heads, 0).flatten(0, 1)
            for each in (key, value)
        )
        weights[name] = torch.cat([query, key, value])
    many.load_state_dict(weights)
    tokens = torch.arange(32).view(2, 16)
    torch.testing.assert_close(few(tokens), many(tokens), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_by_groups_is_fused_on_a_cpu(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, heads, 16, 8, dtype=dtype, requires_grad=True) for heads in (6, 2, 2))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # without it: no (t, t) matrix, or an error
        fused = grouped_attention(q, k, v, 0.0)
    k, v = (each.repeat_interleave(3, dim=1) for each in (k, v))
    torch.testing.assert_close(fused, F.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_heads_repeat_where_no_kernel_takes_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp16 and fp32 on a card. The meta device stands in for it."""
    seen: list[tuple[int, ...]] = []

    def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        seen.append((q.shape[1], k.shape[1], v.shape[1], options["enable_gqa"]))
        return q

    monkeypatch.setattr(transformer.F, "scaled_dot_product_attention", attention)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        q, k, v = (torch.empty(2, heads, 16, 8, dtype=dtype, device="meta") for heads in (6, 2, 2))
        grouped_attention(q, k, v, 0.0)
    assert seen == [(6, 6, 6, False), (6, 6, 6, False), (6, 2, 2, True)]


# Factorised embeddings


def test_a_tied_factor_is_one_matrix_in_and_out() -> None:
    tied, untied = made(embedding_width=8), made(embedding_width=8, tied_embeddings=False)
    names, more = set(dict(tied.named_parameters())), set(dict(untied.named_parameters()))
    assert more - names == {"head.weight", "narrow.weight"}
    assert tied.narrow.weight is tied.widen.weight
    assert tied.widen.weight.shape == (24, 8)
    hidden, tokens = torch.randn(1, 24), torch.arange(64)
    as_input = tied.widen(tied.token_embedding(tokens))  # (v, d): what the model reads of each token
    torch.testing.assert_close(tied.head(tied.narrow(hidden)), hidden @ as_input.T)


def test_the_head_reads_hidden_states_of_the_embeddings_width() -> None:
    task = problem(embedding_width=8)
    rig = assemble(task, knobs_of(logits=ChunkedLogits(7)), CPU)
    head = task.structure(rig.model).head
    assert isinstance(head, nn.Linear)
    assert (head.in_features, head.out_features) == (8, 11)
    assert rig.model(make_batch(TOKENS, 2).inputs).shape == (2, 8, 8)


def test_factors_keep_the_variance_of_embeddings_and_logits() -> None:
    sizes = {"width": 256, "num_heads": 4, "num_layers": 1, "vocab_size": 2000, "positions": Positions.learned}
    for changes in ({}, {"embedding_width": 64}, {"embedding_width": 64, "tied_embeddings": False}):
        model = made(**sizes, **changes)
        embedded = model.widen(model.token_embedding(torch.arange(2000)))
        assert embedded.std().item() == pytest.approx(0.02, rel=0.1)
        logits = model.head(model.narrow(torch.randn(64, 256)))
        assert logits.std().item() == pytest.approx(0.02 * 16, rel=0.1)


# Shared layers


def called(num_distinct_layers: int, every: int) -> tuple[list[int], list[int]]:
    """Which block each layer is, and the blocks that are recomputed, of six layers."""
    task, order = problem(num_layers=6, num_distinct_layers=num_distinct_layers), []
    rig = assemble(task, knobs_of(ckpt=RecomputeEvery(every)), CPU)
    blocks = task.structure(rig.model).blocks
    for index, block in enumerate(blocks):
        block.get_submodule("mlp").register_forward_pre_hook(lambda *_, index=index: order.append(index))
    step(rig, make_batch(TOKENS, 2))
    return order[:6], order[6:]


def test_blocks_take_turns_and_each_is_listed_once() -> None:
    model = made(num_distinct_layers=2)
    assert model.found_blocks().blocks == ("blocks.0", "blocks.1")
    assert len(model.blocks) == 2
    assert called(2, 1)[0] == [0, 1, 0, 1, 0, 1]
    assert called(4, 1)[0] == [0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize(
    ("num_distinct_layers", "every", "again"),
    [(2, 1, [1, 0, 1, 0, 1, 0]), (2, 2, [0, 0, 0]), (3, 2, [2, 0, 2, 0]), (1, 2, [0] * 6), (6, 2, [4, 2, 0])],
)
def test_a_recomputed_block_is_recomputed_in_each_of_its_turns(
    num_distinct_layers: int, every: int, again: list[int]
) -> None:
    assert called(num_distinct_layers, every)[1] == again


def test_a_shared_layer_is_one_that_has_the_same_weights() -> None:
    shared, apart = made(num_distinct_layers=2).double(), made().double()
    weights = apart.state_dict()
    weights.update(shared.state_dict())
    for name in shared.state_dict():
        if name.startswith("blocks."):
            _, index, rest = name.split(".", 2)
            weights[f"blocks.{int(index) + 2}.{rest}"] = shared.state_dict()[name]
    apart.load_state_dict(weights)
    tokens = torch.arange(32).view(2, 16)
    assert torch.equal(shared(tokens), apart(tokens))


def test_arithmetic_counts_every_layer() -> None:
    """Sharing saves weights, no work. Fewer heads of keys save some, narrow embeddings too."""
    plain, shared, grouped, factorised = (
        model_flops(problem(**changes), knobs_of())
        for changes in ({}, {"num_distinct_layers": 1}, {"num_kv_heads": 2}, {"embedding_width": 8})
    )
    assert shared == plain
    tokens, passes = 8, 3 * 2  # forward, two products backward; multiply and add
    assert plain - grouped == tokens * passes * 4 * 24 * (2 * 4 * 4)  # layers, width, features of keys and values
    assert plain - factorised == tokens * passes * (24 * 11 - 8 * 11 - 2 * 24 * 8)
