"""FlexAttention over a window: which blocks of pairs it computes, the numbers of blocks, and what a plan says of it."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention as torchs

from lowvram.compat.torch_flex import compiled, flex_backward, flex_forward
from lowvram.config.errors import BadInput
from lowvram.core.assemble import assemble
from lowvram.core.device import Card, card_of
from lowvram.core.kind import Kind
from lowvram.core.step import step
from lowvram.data.spec import DataSpec, Modality
from lowvram.models import flex_attention
from lowvram.models.attention import Reach
from lowvram.models.flex_attention import BLOCK, TABLES, mask_of, num_pairs, tables
from lowvram.models.local_attention import LocalAttention, LocalKernel
from lowvram.models.transformer import TransformerConfig
from lowvram.planning.target import Target
from lowvram.planning.time.op_cost import attention_flops, flex_flops
from lowvram.planning.trace.events import Trace
from lowvram.planning.trace.tracer import trace
from lowvram.tasks import Auto
from tests.laboratory import (
    CPU,
    IS_EMULATED,
    PROBLEMS,
    Watched,
    as_packed,
    compiler_as_before,
    documents,
    knobs_of,
    make_batch,
    missing_here,
    needs_gpu,
    needs_real_gpu,
)

MEASURED = Path(__file__).parents[2] / "docs" / "results" / "h200" / "local_attention.jsonl"
DTYPES = {"torch.bfloat16": torch.bfloat16, "torch.float32": torch.float32}
CARD = Target(Card("H100", (9, 0), 132))
SPEC = DataSpec(Modality.TOKENS, 11, (300,))
FLEX = TransformerConfig(
    num_layers=2, width=64, num_heads=2, context=300, window=100, global_tokens=3, local_kernel=LocalKernel.flex
)
BLOCKS = replace(FLEX, local_kernel=LocalKernel.blocks)
REACHES = [
    *[(300, 100, 3), (300, 100, 0), (128, 20, 5), (127, 1, 0), (129, 128, 1), (513, 129, 128), (640, 257, 129)],
    *[(1000, 100, 300), (513, 2000, 0), (257, 3, 2000), (1, 1, 0), (1000, 511, 7)],
]


def heads(length: int, num_kv_heads: int, device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> Any:
    """Queries of 4 heads, keys and values, as views of one projection: (2, heads, length, 32), wanting gradients."""
    draw = torch.Generator().manual_seed(length)
    qkv_btnc = torch.randn(2, length, 4 + 2 * num_kv_heads, 32, generator=draw).to(device, dtype)
    return [x.detach().requires_grad_() for x in qkv_btnc.transpose(1, 2).split([4, num_kv_heads, num_kv_heads], 1)]


def values_and_gradients(attend: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    output = attend(*inputs, 0.0)
    return [output.detach(), *torch.autograd.grad(output, inputs, weights_of(output))]


def weights_of(output: Tensor) -> Tensor:
    """A gradient of the output."""
    return torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape).to(output)


def assert_equal(found: list[Tensor], expected: list[Tensor], bound: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() <= bound * max(1.0, float(theirs.abs().max()))


@pytest.mark.parametrize(("length", "window", "global_tokens"), REACHES)
def test_blocks_of_pairs_are_those_of_a_dense_mask(length: int, window: int, global_tokens: int) -> None:
    """Whole blocks hold nothing else, others at least one pair; and the tables of keys are those of queries."""
    reach, num_blocks = Reach(window, global_tokens), -(-length // BLOCK)
    places = torch.arange(num_blocks * BLOCK)
    is_seen = reach.sees(places[:, None], places) & (places[:, None] < length) & (places < length)
    blocks_mmss = is_seen.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).transpose(1, 2)
    is_any_mm, is_whole_mm = blocks_mmss.flatten(2).any(2), blocks_mmss.flatten(2).all(2)
    named = dict(zip(TABLES, tables(reach, length, CPU), strict=True))
    wanted = {"": is_any_mm & ~is_whole_mm, "full_": is_whole_mm}
    for kind, is_wanted_mm in wanted.items():
        for side, expected_mm in (("kv", is_wanted_mm), ("q", is_wanted_mm.T)):
            found_mm = torch.zeros_like(expected_mm)
            numbers, indices = named[f"{kind}{side}_num_blocks"], named[f"{kind}{side}_indices"]
            for row in range(num_blocks):
                found_mm[row, indices[0, 0, row, : numbers[0, 0, row]].long()] = True
            assert torch.equal(found_mm, expected_mm)
    assert num_pairs(reach, length) == BLOCK**2 * int(is_any_mm.sum())


@pytest.mark.parametrize(("length", "window", "global_tokens"), REACHES[:3])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_its_formula_gives_the_numbers_of_blocks(
    length: int, window: int, global_tokens: int, num_kv_heads: int
) -> None:
    """What is compiled for cards, in torch's own operators: forward, and backward from what the forward pass keeps."""
    reach, inputs = Reach(window, global_tokens), heads(length, num_kv_heads)
    mask = mask_of(reach, length, tables(reach, length, CPU))
    with torch.no_grad():
        q, k, v = inputs
        output, sums = flex_forward(q, k, v, mask)
        found = [output, *flex_backward(weights_of(output), q, k, v, output, sums, mask)]
    assert_equal(found, values_and_gradients(LocalAttention(reach), inputs), 5e-6)


@pytest.mark.slow
@pytest.mark.skipif(missing_here(("compile", "blocks")), reason="no C++ compiler")
@pytest.mark.parametrize(("length", "window", "global_tokens"), [(300, 100, 3), (640, 257, 129), (128, 20, 5)])
def test_torchs_kernel_reads_the_tables(length: int, window: int, global_tokens: int) -> None:
    """Compiled for a CPU, where it has no backward pass: it computes the blocks that the tables name, and no others."""
    reach, inputs = Reach(window, global_tokens), heads(length, 2)
    mask = mask_of(reach, length, tables(reach, length, CPU))
    with compiler_as_before(), torch.no_grad():
        found = torch.compile(torchs)(*(x.detach() for x in inputs), block_mask=mask, enable_gqa=True)
        assert_equal([found], [LocalAttention(reach)(*inputs, 0.0)], 2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", [pytest.param(torch.device("cuda"), marks=[*needs_gpu, needs_real_gpu])], ids=str)
def test_a_card_gives_the_numbers_of_blocks(device: torch.device, dtype: torch.dtype) -> None:
    for length, window, global_tokens in REACHES[:3]:
        for num_kv_heads in (4, 2):
            reach, inputs = Reach(window, global_tokens), heads(length, num_kv_heads, device, dtype)
            found = values_and_gradients(LocalAttention(reach, LocalKernel.flex), inputs)
            expected = values_and_gradients(LocalAttention(reach), inputs)
            assert_equal(found, expected, 1e-5 if dtype is torch.float32 else 2e-2)


# The model


def loss_and_gradients(config: TransformerConfig, device: torch.device, **knobs: str) -> list[Tensor]:
    """Of a step, by the names of the weights. A card draws other initial weights than a CPU."""
    watched = Watched(knobs_of(optimizer="sgd")["optimizer=sgd"])
    chosen = knobs_of(**{"stepping": "after_backward", **knobs}, optimizer=watched)
    with compiler_as_before():
        rig = assemble(Auto().pose(config, SPEC), chosen, device)
        loss, _ = step(rig, make_batch(SPEC, 2).to(device))
    gradients = [watched.gradients[weight][0] for _, weight in sorted(rig.model.named_parameters())]
    return [each.cpu() for each in (loss, *gradients)]


def with_values(function: Callable[..., Any], examples: list[Tensor]) -> Callable[..., Any]:
    """On the emulated device: kernels, whose results are those of the function on a CPU."""
    kernels, thread = compiled(function, examples), ThreadPoolExecutor(1)

    def call(*given: Tensor) -> Any:
        results = kernels(*given)
        on_cpu = [tensor.cpu() for tensor in given]
        # A thread has no modes: under some torch's own formula fails.
        for result, value in zip(results, thread.submit(torch.no_grad()(function), *on_cpu).result(), strict=True):
            result.copy_(value)
        return results

    return call


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A CUDA device, on which FlexAttention has values."""
    if IS_EMULATED:
        monkeypatch.setattr(flex_attention, "compiled", with_values)
    return torch.device("cuda")


def test_a_cpu_computes_blocks() -> None:
    for ours, theirs in zip(loss_and_gradients(FLEX, CPU), loss_and_gradients(BLOCKS, CPU), strict=True):
        assert torch.equal(ours, theirs)


COMPANY: list[dict[str, str]] = [
    {},
    {"ckpt": "every1"},
    {"ckpt": "selective"},
    {"offload": "activations"},
    {"tile": "blocks"},
    {"stepping": "in_backward"},
    {"compile": "torchscript"},
]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("knobs", COMPANY, ids=str)
def test_a_step_on_a_card_has_the_gradients_of_blocks(knobs: dict[str, str], card: torch.device) -> None:
    found, expected = loss_and_gradients(FLEX, card, **knobs), loss_and_gradients(BLOCKS, card)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_compiled_blocks_call_its_kernels(card: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once in each layer and pass. On the emulated device the compiled rest has no values."""
    calls, run = list[Any](), flex_attention.run
    monkeypatch.setattr(flex_attention, "run", lambda function, *args: calls.append(function) or run(function, *args))
    with compiler_as_before():
        rig = assemble(Auto().pose(FLEX, SPEC), knobs_of(compile="blocks"), card)
        loss, _ = step(rig, make_batch(SPEC, 2).to(card))
    assert calls == [flex_forward] * 2 + [flex_backward] * 2
    if not IS_EMULATED:
        torch.testing.assert_close(loss.cpu(), loss_and_gradients(BLOCKS, card)[0], rtol=1e-4, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16_pure"])
def test_a_step_on_a_card_stays_in_the_band_of_16_bits(precision: str, card: torch.device) -> None:
    found, expected = loss_and_gradients(FLEX, card, precision=precision), loss_and_gradients(BLOCKS, card)
    ours, theirs = (torch.cat([each.double().flatten() for each in values]) for values in (found, expected))
    assert (ours - theirs).norm() <= 0.02 * theirs.norm()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"window": None, "global_tokens": 0}, "blocks where model.window is null: each token sees all before it"),
        ({"dropout": 0.1}, "blocks where model.dropout=0.1: FlexAttention drops nothing"),
        ({"num_heads": 8}, "blocks where a head has 8 features: FlexAttention takes 16 or more"),
    ],
)
def test_what_it_cant_compute_is_named(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadInput) as caught:
        replace(FLEX, **changes)
    assert str(caught.value) == f"model.local_kernel='flex': must be {sentence}"


# Plans


def planned(config: TransformerConfig, target: Target, spec: DataSpec = SPEC, **knobs: str) -> Trace:
    return trace(Auto().pose(config, spec), knobs_of(**knobs), 4, target)


def num_made(found: Trace) -> int:
    """How many outputs FlexAttention made, in the forward pass or again, in both steps."""
    return sum(maker.startswith("near_attention in ") for maker in found.makers) // 2


@pytest.mark.slow
def test_a_plan_for_a_card_has_its_operators() -> None:
    """Two in each of two steps, and one more where blocks are computed again and it isn't among what is kept."""
    assert num_made(planned(FLEX, CARD)) == 4
    assert num_made(planned(FLEX, CARD, ckpt="selective")) == 4
    assert num_made(planned(FLEX, CARD, ckpt="every1")) == 8
    texts = documents([200, 80, 150, 30], SPEC)
    for others in (
        planned(FLEX, Target()),
        planned(BLOCKS, CARD),
        planned(replace(FLEX, window=300), CARD),
        planned(FLEX, CARD, as_packed(texts, SPEC)),
    ):
        assert num_made(others) == 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_takes_less_memory_than_blocks(precision: str) -> None:
    """It needs no copies of keys and values for the moment. Only with a narrow MLP is there the peak."""
    config = replace(FLEX, context=2048, window=128, mlp_width=8)
    spec = DataSpec(Modality.TOKENS, 11, (2048,))
    flex, blocks = (
        planned(replace(config, local_kernel=kernel), CARD, spec, precision=precision).sums(is_steady=True)
        for kernel in (LocalKernel.flex, LocalKernel.blocks)
    )
    assert flex.by_kind_max[Kind.ACTIVATIONS] < blocks.by_kind_max[Kind.ACTIVATIONS]
    assert flex.peak_bytes < blocks.peak_bytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("knobs", [{}, {"precision": "bf16"}, {"ckpt": "every1"}], ids=str)
def test_a_card_holds_what_is_planned(knobs: dict[str, str], card: torch.device) -> None:
    """With a narrow MLP the peak is in attention's backward pass. A plan leaves out the tables of blocks."""
    spec = DataSpec(Modality.TOKENS, 11, (1000,))
    problem = Auto().pose(replace(FLEX, context=1000, mlp_width=8), spec)
    tiny = PROBLEMS["transformer"]  # its step makes cuBLAS's workspaces
    step(assemble(tiny, knobs_of(), card), make_batch(tiny.spec, 4).to(card))
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    rig = assemble(problem, knobs_of(**knobs), card)
    for _ in range(2):
        step(rig, make_batch(spec, 4).to(card))
    held = torch.cuda.max_memory_allocated() - before
    expected = trace(problem, knobs_of(**knobs), 4, Target(card_of(card))).sums().peak_bytes
    assert held == pytest.approx(expected, rel=0.01)


def test_its_planned_time_beside_full_attention_is_what_was_measured() -> None:
    """Within a factor of 1.5, on an H200."""
    rows = [json.loads(line) for line in MEASURED.read_text().splitlines()]
    for full, _, flex in zip(*[iter(rows)] * 3, strict=True):
        heads = torch.empty(full["b"], 16, full["t"], 64, device="meta", dtype=DTYPES[full["dtype"]])
        wholes, within = 0, 0
        for is_backward in (False, True):
            wholes += attention_flops(heads, heads, heads, is_backward, is_causal=True)
            within += flex_flops(is_backward, *[heads] * 4, full["window"], full["g"], out_val=None)
        assert 1 / 1.5 < (within / wholes) / (flex["ms"] / full["ms"]) < 1.5
