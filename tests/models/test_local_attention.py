"""Attention within a window: the numbers of a dense mask, and what it keeps for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowvram.config.errors import BadInput
from lowvram.core.assemble import assemble
from lowvram.core.device import Card
from lowvram.core.kind import Kind
from lowvram.core.ledger import ledger
from lowvram.core.rig import Part
from lowvram.core.step import step
from lowvram.data.loader import collate
from lowvram.data.packed import Packed
from lowvram.data.spec import DataSpec, Modality
from lowvram.models import local_attention
from lowvram.models.attention import Reach, grouped_attention
from lowvram.models.local_attention import LocalAttention, block_size
from lowvram.models.transformer import Positions, TransformerConfig
from lowvram.planning.target import Target
from lowvram.planning.trace.tracer import trace
from lowvram.tasks import Auto
from lowvram.worker.mfu import model_flops
from tests.laboratory import (
    CPU,
    InDouble,
    Watched,
    as_packed,
    compiler_as_before,
    documents,
    knobs_of,
    make_batch,
    missing_here,
)

pytestmark = pytest.mark.sampled(2)

LENGTH = 110  # no multiple of a block
SPEC = DataSpec(Modality.TOKENS, 11, (LENGTH,))
LOCAL = TransformerConfig(num_layers=2, width=16, num_heads=2, context=LENGTH, window=20, global_tokens=3)
Attend = Callable[..., Tensor]


def heads(length: int, num_kv_heads: int = 2, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries, keys and values (2, heads, length, 8) that want gradients; the same numbers in each format."""
    draw = torch.Generator().manual_seed(length)
    shapes = [(2, number, length, 8) for number in (2, num_kv_heads, num_kv_heads)]
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def dense(reach: Reach) -> Attend:
    """Attention with a mask of all pairs, written independently."""

    def attend(q_bntc: Tensor, k_bntc: Tensor, v_bntc: Tensor, dropout: float) -> Tensor:
        length = q_bntc.shape[2]
        seen = [
            [
                other <= token and (token - other < reach.window or other < reach.global_tokens)
                for other in range(length)
            ]
            for token in range(length)
        ]
        mask = torch.tensor(seen)
        return F.scaled_dot_product_attention(q_bntc, k_bntc, v_bntc, mask, dropout, enable_gqa=True)

    return attend


def values_and_gradients(attend: Attend, inputs: list[Tensor]) -> list[Tensor]:
    """The output, and the gradients of queries, keys and values."""
    output = attend(*inputs, 0.0)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), inputs)]


@pytest.mark.parametrize(
    ("length", "window", "global_tokens"),
    [
        (110, 20, 0),
        (110, 20, 3),
        (110, 32, 0),
        (96, 32, 0),  # whole blocks
        (97, 1, 0),  # each token sees itself alone
        (130, 41, 37),  # more global tokens than the smallest block has
        (40, 20, 0),  # one block, and a few tokens
        (31, 20, 5),  # less than a block
        (33, 32, 1),
        (150, 149, 0),
    ],
)
@pytest.mark.parametrize("num_kv_heads", [2, 1])
def test_blocks_give_the_numbers_of_a_dense_mask(
    length: int, window: int, global_tokens: int, num_kv_heads: int
) -> None:
    reach = Reach(window, global_tokens)
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        inputs = heads(length, num_kv_heads, dtype)
        found = values_and_gradients(LocalAttention(reach), inputs)
        expected = values_and_gradients(dense(reach), inputs)
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours - theirs).abs().max() <= bound * max(1.0, float(theirs.abs().max()))


@pytest.mark.parametrize("reach", [Reach(110), Reach(4000), Reach(5, 110), Reach(5, 4000)])
def test_a_reach_over_all_tokens_is_full_attention_to_the_bit(reach: Reach) -> None:
    for ours, theirs in zip(
        values_and_gradients(LocalAttention(reach), heads(LENGTH)),
        values_and_gradients(grouped_attention, heads(LENGTH)),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("global_tokens", [0, 3])
def test_a_token_out_of_reach_has_no_gradient(global_tokens: int) -> None:
    inputs = heads(LENGTH)
    token, reach = 90, Reach(20, global_tokens)
    _, keys, values = torch.autograd.grad(LocalAttention(reach)(*inputs, 0.0)[:, :, token].sum(), inputs)
    for gradient_bntc in (values, keys):
        has_gradient = (gradient_bntc != 0).any(-1).all(1).all(0)
        expected = [other < global_tokens or token - 20 < other <= token for other in range(LENGTH)]
        assert has_gradient.tolist() == expected


def test_dropout_draws_the_same_when_it_is_computed_again() -> None:
    inputs = heads(LENGTH)
    torch.manual_seed(0)
    with torch.no_grad():
        output = LocalAttention(Reach(20))(*inputs, 0.4)
    torch.manual_seed(0)
    again = LocalAttention(Reach(20))(*inputs, 0.4)
    assert torch.equal(output, again)
    assert not torch.equal(output, LocalAttention(Reach(20))(*inputs, 0.0))
    # The output is linear in the values: a gradient made with other draws wouldn't give it back.
    again.sum().backward()
    assert inputs[2].grad is not None
    torch.testing.assert_close((inputs[2].grad * inputs[2]).sum(), again.sum(), rtol=1e-10, atol=1e-10)


def test_only_queries_keys_and_values_are_kept() -> None:
    inputs = heads(LENGTH, dtype=torch.float32)
    kept: set[int] = set()

    def note(tensor: Tensor) -> Tensor:
        kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        LocalAttention(Reach(20, 3))(*inputs, 0.1)
    assert kept - {0} <= {tensor.untyped_storage().data_ptr() for tensor in inputs}  # 0: an empty tensor


@pytest.mark.parametrize(("window", "expected"), [(1, 32), (32, 32), (33, 40), (100, 104), (512, 512)])
def test_a_block_is_no_smaller_than_the_window(window: int, expected: int) -> None:
    assert block_size(window) == expected


# The model


def losses(config: TransformerConfig, knobs: dict[str, Any], batch: Part, is_double: bool = True) -> list[Tensor]:
    """The loss of a step, and the gradients of all weights by name."""
    problem = Auto().pose(config, SPEC)
    chosen = {**knobs, "stepping": knobs.get("stepping", "after_backward")}
    watched = Watched(knobs_of(optimizer="sgd")["optimizer=sgd"])
    with compiler_as_before():
        rig = assemble(InDouble(problem) if is_double else problem, knobs_of(**chosen, optimizer=watched), CPU)
        loss, _ = step(rig, batch)
    return [loss, *(watched.gradients[weight][0] for _, weight in sorted(rig.model.named_parameters()))]


def model_with_dense_mask(monkeypatch: pytest.MonkeyPatch, reach: Reach) -> None:
    """Afterwards windows are masks of all pairs, and nothing is computed again."""
    monkeypatch.setattr(local_attention, "in_blocks", lambda q, k, v, dropout, reach: dense(reach)(q, k, v, dropout))
    monkeypatch.setattr(local_attention, "keeps_everything", lambda: True)


COMPANY: list[dict[str, Any]] = [
    {"ckpt": "every1"},
    {"ckpt": "selective"},
    {"ckpt": "sqrt"},
    {"compile": "torchscript"},
    {"offload": "activations_disk"},
    {"tile": "blocks"},
    {"tile": "mlp"},
    {"offload": "activations"},
    {"logits": "chunked"},
    {"accum": "x2"},
    {"stepping": "in_backward"},
]


@pytest.mark.parametrize("knobs", [{}, *COMPANY], ids=str)
def test_a_step_has_the_gradients_of_a_dense_mask(knobs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(SPEC, 4)
    found = losses(LOCAL, knobs, batch)
    model_with_dense_mask(monkeypatch, Reach(20, 3))
    for ours, theirs in zip(found, losses(LOCAL, {}, batch), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-13)


@pytest.mark.slow
@pytest.mark.skipif(missing_here(("compile", "blocks")), reason="no C++ compiler")
@pytest.mark.parametrize("knobs", [{}, {"ckpt": "every1"}, {"ckpt": "selective"}, {"ckpt": "compiler"}], ids=str)
@pytest.mark.parametrize("compiled", ["blocks", "model"])
def test_a_compiled_step_has_the_gradients_of_an_eager_one(knobs: dict[str, Any], compiled: str) -> None:
    batch = make_batch(SPEC, 4)
    found = losses(LOCAL, {"compile": compiled, **knobs}, batch, is_double=False)
    for ours, theirs in zip(found, losses(LOCAL, {}, batch, is_double=False), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("positions", Positions)
def test_a_model_looks_back_as_far_as_its_windows_add_up(positions: Positions) -> None:
    """Two layers of 20 tokens: 39 tokens; the global ones carry what they saw to all others."""
    tokens_bt = torch.arange(LENGTH)[None] % 11
    changed_bt = tokens_bt.clone()
    changed_bt[0, 50] = 9
    for global_tokens, last in ((0, 50 + 38), (3, 50 + 38)):
        config = replace(LOCAL, positions=positions, global_tokens=global_tokens)
        model = assemble(InDouble(Auto().pose(config, SPEC)), knobs_of(), CPU).model
        differs = (model(tokens_bt) != model(changed_bt)).any(-1)[0].nonzero().flatten().tolist()
        assert differs == list(range(50, last + 1))
    changed_bt = tokens_bt.clone()
    changed_bt[0, 1] = 9
    assert (model(tokens_bt) != model(changed_bt)).any(-1)[0, 1:].all()


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16_pure"])
def test_it_stays_in_the_band_of_16_bits(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(SPEC, 4)
    found = losses(LOCAL, {"precision": precision}, batch, is_double=False)
    model_with_dense_mask(monkeypatch, Reach(20, 3))
    expected = losses(LOCAL, {"precision": precision}, batch, is_double=False)
    ours, theirs = (torch.cat([each.double().flatten() for each in values]) for values in (found, expected))
    assert (ours - theirs).norm() <= 0.02 * theirs.norm()


@pytest.mark.parametrize("global_tokens", [0, 2])
def test_packed_sequences_have_windows_of_their_own(global_tokens: int) -> None:
    """Each sequence alone, or several in a row: the same loss."""
    config = replace(LOCAL, window=5, global_tokens=global_tokens)
    texts = documents([31, 52, 19, 71, 8, 40], SPEC)
    rows = Packed().collate(texts, [(index, 0) for index in range(6)])
    assert rows.num_samples < 6
    packed, alone = (
        step(assemble(InDouble(Auto().pose(config, spec)), knobs_of(), CPU), batch)[0]
        for spec, batch in ((as_packed(texts, SPEC), rows), (SPEC, collate(texts, [(index, 0) for index in range(6)])))
    )
    torch.testing.assert_close(packed, alone, rtol=1e-6, atol=0)  # the loss is in fp32


def test_pruned_heads_keep_their_window() -> None:
    smaller = LOCAL.pruned(0.5, 8)
    assert (smaller.num_heads, smaller.reach) == (1, Reach(20, 3))


# Memory and arithmetic


def most_activations(config: TransformerConfig, knobs: dict[str, Any]) -> tuple[int, int]:
    """The most that activations take in a step, and the peak."""
    problem, batch = Auto().pose(config, SPEC), make_batch(SPEC, 4)
    rig = assemble(problem, knobs_of(**knobs), CPU)
    step(rig, batch)
    with ledger(rig.model, rig.stepper, batch.tensors(), CPU) as peak:
        step(rig, batch)
    return peak.by_kind_max[Kind.ACTIVATIONS], peak.peak_bytes


@pytest.mark.sampled(6)
@pytest.mark.parametrize("knobs", [{}, {"ckpt": "every1"}, {"precision": "bf16"}, {"tile": "blocks"}], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_plan_is_what_is_measured(knobs: dict[str, Any], dropout: float) -> None:
    config = replace(LOCAL, dropout=dropout)
    problem = Auto().pose(config, SPEC)
    planned = trace(problem, knobs_of(**knobs), 4, Target()).sums(is_steady=True)
    assert planned.peak_bytes == most_activations(config, knobs)[1]


def test_a_window_saves_memory_where_attention_keeps_all_pairs() -> None:
    """On a CPU attention with dropout does, and fused attention doesn't."""
    whole = replace(LOCAL, window=None, global_tokens=0, num_layers=4)
    local = replace(whole, window=20)
    assert most_activations(local, {})[0] <= 1.05 * most_activations(whole, {})[0]
    local, whole = (replace(config, dropout=0.1) for config in (local, whole))
    assert most_activations(local, {})[0] <= 0.5 * most_activations(whole, {})[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_card_is_planned(precision: str) -> None:
    """Flash attention is there for full attention alone; a window keeps no more than it."""
    card, knobs = Target(Card("A100", (8, 0), 108)), knobs_of(precision=precision)
    spec = DataSpec(Modality.TOKENS, 11, (1024,))
    whole = TransformerConfig(num_layers=4, width=64, num_heads=2, context=1024)
    found = [
        trace(Auto().pose(config, spec), knobs, 4, card).sums(is_steady=True).by_kind_max[Kind.ACTIVATIONS]
        for config in (whole, replace(whole, window=128, global_tokens=4))
    ]
    assert found[1] <= 1.1 * found[0]


def test_a_count_of_arithmetic_leaves_out_what_is_computed_again() -> None:
    """Three products for one forward and backward pass, of the pairs that blocks hold."""
    config = replace(LOCAL, global_tokens=0)
    whole = replace(config, window=None)
    found, of_whole = (model_flops(Auto().pose(each, SPEC), knobs_of()) for each in (config, whole))
    pairs = 32 * 32 + 3 * 32 * 64  # a first block of 32 tokens, and three others
    per_pair = 2 * 2 * 3 * config.width * config.num_layers
    assert of_whole - found == per_pair * (LENGTH**2 - pairs)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"window": 0}, "model.window=0: must be a positive number, or null"),
        ({"global_tokens": -1}, "model.global_tokens=-1: must be at least 0"),
        ({"window": None}, "model.global_tokens=3: must be 0 unless model.window is given"),
    ],
)
def test_values_out_of_range_are_named(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadInput) as caught:
        replace(LOCAL, **changes)
    assert str(caught.value).startswith(sentence)
