"""Predicted times: work counted by hand, and orders that any card would keep."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowvram.core.device import Card
from lowvram.core.knob import Knob
from lowvram.data.spec import DataSpec, Modality
from lowvram.knobs.accum import Parts
from lowvram.knobs.stepping.in_backward import InBackward, SumsIn
from lowvram.models.transformer import TransformerConfig
from lowvram.planning.cache import TraceCache
from lowvram.planning.devices import DeviceSpec, load_device
from lowvram.planning.scaling import TraceScaler
from lowvram.planning.target import Target
from lowvram.planning.time import op_cost
from lowvram.planning.time import roofline as timing
from lowvram.planning.time.op_cost import FORMATS, FUSED_CALLS, STREAMS, Column, Stream, recipe_of
from lowvram.planning.time.roofline import DataSheet, StepTime, step_time
from lowvram.planning.trace.events import PHASES, Phase, Trace
from lowvram.planning.trace.tracer import trace
from lowvram.tasks import Auto, Problem
from tests.laboratory import PROBLEMS, knobs_of
from tests.tiers import first_of

pytestmark = pytest.mark.medium

A100, T4, CPU = Target(Card("A100", (8, 0))), Target(Card("T4", (7, 5))), Target()
WIDTH, LENGTH, VOCABULARY, NUM_SAMPLES = 512, 256, 64, 128  # the host never takes longer than the card
ATEN = torch.ops.aten


def transformer(num_layers: int = 4) -> Problem:
    """Wide enough that products count."""
    config = TransformerConfig(num_layers=num_layers, width=WIDTH, num_heads=8, context=LENGTH)
    return Auto().pose(config, DataSpec(Modality.TOKENS, VOCABULARY, (LENGTH,)))


def traced(problem: Problem, on: Target = A100, /, **choices: Any) -> Trace:
    return trace(problem, knobs_of(**choices), NUM_SAMPLES, on)


def time_on(device: str | DeviceSpec, found: Trace | Tensor) -> StepTime:
    spec = load_device(device) if isinstance(device, str) else device
    told = step_time(found if isinstance(found, Tensor) else found.work, DataSheet(spec))
    assert told is not None
    return told


def flops_of(found: Trace) -> int:
    return int((found.work[:, Column.FLOPS] * found.work[:, Column.TIMES]).sum())


def bytes_on(found: Trace, stream: Stream) -> int:
    here = found.work[:, Column.STREAM] == STREAMS.index(stream)
    return int((found.work[:, Column.BYTES] * found.work[:, Column.TIMES])[here].sum())


def formats_of(found: Trace) -> set[str]:
    """Of products."""
    return {FORMATS[code] for code in found.work[found.work[:, Column.FLOPS] > 0][:, Column.FORMAT].tolist()}


@pytest.mark.parametrize("choices", [{"precision": "bf16"}, {"precision": "fp32"}], ids=str)
@pytest.mark.parametrize("target", [A100, CPU], ids=["card", "cpu"])
def test_flops_are_those_counted_by_hand(choices: dict[str, str | Knob], target: Target) -> None:
    """Each weight of a product is used once in the forward and twice in the backward pass, by two operations a token;
    fused attention has two products of all pairs forward and five backward, half of which a causal mask hides."""
    num_layers, num_tokens = 2, NUM_SAMPLES * LENGTH
    weights = num_layers * 12 * WIDTH**2 + VOCABULARY * WIDTH
    attention = num_layers * (2 + 5) * 2 * NUM_SAMPLES * LENGTH**2 * WIDTH // 2
    found = traced(transformer(num_layers), target, **choices)
    assert flops_of(found) == 3 * 2 * num_tokens * weights + attention


def test_bytes_are_those_counted_by_hand() -> None:
    """What is read and written, by the operator's schema: nothing is counted twice, and no kernel for nothing."""
    reads = {
        ATEN.add.Tensor: ([1, 1], 1),
        ATEN.add_.Tensor: ([2, 1], 0),
        ATEN.copy_.default: ([1, 1], 0),
        ATEN.embedding.default: ([0, 2], 2),
    }
    for operator, expected in reads.items():
        recipe = recipe_of(operator)
        assert recipe is not None
        assert ([times for _, _, times in recipe.reads], recipe.new) == expected
    assert all(recipe_of(operator) is None for operator in (ATEN._unsafe_view.default, ATEN.empty.memory_format))


def test_an_update_reads_and_writes_weights_and_state_once() -> None:
    """AdamW: a gradient is read, and before that for the norm; a weight and two moments are read and written. So it is
    with moments of a byte each, though their kernel is compiled and isn't run on paper."""
    problem = transformer(1)
    num_weights = sum(weight.numel() for weight in problem.make_model().parameters())
    for option, per_moment in (("adamw", 4), ("adamw_8bit", 1)):
        work = traced(problem, optimizer=option).work
        update = work[work[:, Column.PART] == 1][:, [Column.PHASE, Column.BYTES]]
        update = int(update[update[:, 0] == PHASES.index(Phase.UPDATE), 1].sum())
        assert update == pytest.approx(num_weights * (4 + 4 + 2 * 4 + 2 * 2 * per_moment), rel=0.03)


@pytest.mark.slow
def test_products_run_in_the_format_of_their_precision() -> None:
    for option, expected in (("fp32", "fp32"), ("tf32", "tf32"), ("bf16", "bf16"), ("bf16_pure", "bf16")):
        assert formats_of(traced(PROBLEMS["transformer"], precision=option)) == {expected}
        assert formats_of(traced(PROBLEMS["resnet"], precision=option)) == {expected}
    assert formats_of(traced(PROBLEMS["resnet"], T4, precision="fp16")) == {"fp16"}
    mixed = formats_of(traced(transformer(1), Target(Card("H100", (9, 0))), precision="fp8"))
    assert mixed == {"fp8", "bf16"}  # attention and the head multiply in bf16


def test_twice_the_layers_take_twice_the_time() -> None:
    """Beyond what every model has but once: its embedding, its head and its loss."""
    one, two, three = (time_on("a100", traced(transformer(num), precision="bf16")).step_ms for num in (2, 4, 6))
    assert three - two == pytest.approx(two - one, rel=0.02)
    assert two / one == pytest.approx(2, rel=0.1)


def test_recomputing_every_block_adds_almost_a_third() -> None:
    """The forward pass of each block, but for its last product (a third of its weights), which nobody asks for."""
    plain, again = (traced(transformer(), ckpt=option) for option in ("none", "every1"))
    weights, attention = 2 * NUM_SAMPLES * LENGTH * 8 * WIDTH**2, 2 * NUM_SAMPLES * LENGTH**2 * WIDTH
    assert flops_of(again) - flops_of(plain) == 4 * (weights + attention)
    assert 1.2 < time_on("a100", again).step_ms / time_on("a100", plain).step_ms < 4 / 3


def test_fewer_bits_are_faster_on_tensor_cores() -> None:
    fp32, tf32, bf16 = (traced(transformer(), precision=option) for option in ("fp32", "tf32", "bf16"))
    times = [time_on("a100", found).step_ms for found in (bf16, tf32, fp32)]
    assert times == sorted(times)
    assert time_on("a100", fp32).products_ms == pytest.approx(time_on("a100", tf32).products_ms * 156 / 19.5, rel=0.1)


def test_a_device_that_is_better_in_one_thing_is_never_slower() -> None:
    plain = load_device("rtx3060")
    names = [name for name, value in vars(plain).items() if name.endswith("_per_s") and value is not None]
    for choices in ({"precision": "bf16"}, {"offload": "activations"}):
        found = traced(transformer(1), **choices)
        for name in names:
            better = replace(plain, **{name: 2 * getattr(plain, name)})
            assert time_on(better, found).step_ms <= time_on(plain, found).step_ms
    found = traced(transformer(1), precision="bf16")
    ranked = ["rtx3060", "rtx3070", "rtx3090", "a100", "a100_80gb", "h100", "h200"]
    times = [time_on(device, found).step_ms for device in ranked]
    assert times == sorted(times, reverse=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("option", ["none", "activations", "parameters"])
def test_more_parts_are_never_faster(option: str) -> None:
    whole, parts = (traced(transformer(1), offload=option, accum=each) for each in ("none", "x4"))
    assert flops_of(whole) == flops_of(parts)
    assert time_on("a100", parts).step_ms > time_on("a100", whole).step_ms


def test_what_is_offloaded_travels_beside_the_computation() -> None:
    """Gradients out and weights in, each once; the host updates, and its time has a name of its own."""
    problem = transformer(1)
    num_bytes = 4 * sum(weight.numel() for weight in problem.make_model().parameters())
    plain, away = (traced(problem, stepping=option) for option in ("after_backward", "cpu_offload"))
    assert bytes_on(away, Stream.TO_HOST) == bytes_on(away, Stream.TO_DEVICE) == num_bytes
    assert bytes_on(away, Stream.HOST) == pytest.approx(7 * num_bytes, rel=0.01)  # as AdamW reads and writes
    here, there = time_on("a100", plain), time_on("a100", away)
    assert here.host_ms == here.copies_ms == 0
    assert there.host_ms == pytest.approx(1e3 * 7 * num_bytes / timing.HOST_BYTES_PER_S, rel=0.2)
    assert there.step_ms > here.step_ms


def test_copies_cost_only_what_computing_does_not_hide() -> None:
    found, device = traced(transformer(1), offload="activations"), load_device("a100")
    free = time_on(replace(device, pcie_bytes_per_s=1e15), found)
    slow = time_on(replace(device, pcie_bytes_per_s=1e9), found)
    assert free.copies_ms == 0
    travelling_ms = (
        1e3 * (bytes_on(found, Stream.TO_HOST) + bytes_on(found, Stream.TO_DEVICE)) / (timing.PCIE_EFFICIENCY * 1e9)
    )
    assert 0 < travelling_ms - slow.copies_ms < slow.step_ms
    assert slow.beside_ms["copies"] == pytest.approx(travelling_ms)
    assert slow.step_ms - slow.copies_ms == pytest.approx(free.step_ms)


def test_a_compiled_point_takes_the_time_of_its_eager_equivalent() -> None:
    eager, compiled = (traced(PROBLEMS["transformer"], compile=option) for option in ("none", "blocks"))
    assert torch.equal(eager.work, compiled.work)


def test_a_compiled_kernel_of_few_operators_keeps_the_host_for_longer_than_an_operator() -> None:
    """Of so small a model the host's time is all that counts. Kernels of sums are launched by hand."""
    problem = PROBLEMS["transformer"]
    num_weights = len(list(problem.make_model().parameters()))
    assert FUSED_CALLS * num_weights in traced(problem, optimizer="adamw_8bit").work[:, Column.CALLS].tolist()
    launched = traced(problem, stepping=InBackward(sums=SumsIn.int8), accum=Parts(4)).work[:, Column.CALLS]
    assert set(launched.tolist()) == {0, 1}
    work = traced(problem, optimizer="adamw_companded").work
    is_compiled = work[:, Column.CALLS] > 1
    assert set(work[is_compiled, Column.CALLS].tolist()) == {FUSED_CALLS}
    as_others = work.clone()
    as_others[is_compiled, Column.CALLS] = 1
    longer_ms = 1e3 * timing.DISPATCH_S * (FUSED_CALLS - 1) * int(work[is_compiled, Column.TIMES].sum())
    assert time_on("h100", work).step_ms - time_on("h100", as_others).step_ms == pytest.approx(longer_ms)


def test_a_sum_in_few_bits_is_one_kernel_for_each_matrix_and_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each part but the last one. To be told from other operators they count as compiled here."""
    problem, num_parts = PROBLEMS["transformer"], 4
    num_matrices = sum(weight.ndim > 1 for weight in problem.make_model().parameters())
    monkeypatch.setattr(op_cost, "LAUNCHED", set())
    monkeypatch.setattr(op_cost, "recipe_of", cache(recipe_of.__wrapped__))
    work = traced(problem, stepping=InBackward(sums=SumsIn.int8), accum=Parts(num_parts)).work
    assert int(work[work[:, Column.CALLS] == FUSED_CALLS, Column.TIMES].sum()) == num_matrices * (num_parts - 1)


def test_autograd_adds_gradients_without_the_host() -> None:
    """It does so in C++, for each weight from the second part on. What a hook adds in Python takes as long as ever."""
    problem, num_parts = PROBLEMS["transformer"], 4
    num_weights = len(list(problem.make_model().parameters()))

    def num_free(num_parts: int, **choices: str | Knob) -> int:
        work = traced(problem, accum=Parts(num_parts), **choices).work
        return int(work[work[:, Column.CALLS] == 0, Column.TIMES].sum())

    of_activations = num_parts * num_free(1)
    assert of_activations > 0
    assert num_free(num_parts) == of_activations + (num_parts - 1) * num_weights
    assert num_free(num_parts, stepping=InBackward(sums=SumsIn.bf16)) == of_activations


@pytest.mark.parametrize("device", ["generic", "cpu"])
def test_no_time_is_made_up_where_rates_are_not_known(device: str) -> None:
    assert step_time(traced(PROBLEMS["resnet"]).work, DataSheet(load_device(device))) is None
    no_bf16 = replace(load_device("a100"), bf16_flops_per_s=None)
    assert step_time(traced(PROBLEMS["resnet"], precision="bf16").work, DataSheet(no_bf16)) is None


@pytest.mark.parametrize(
    ("problem", "choices"),
    first_of([("resnet", {"precision": "fp16", "stepping": "in_backward"}), ("transformer", {"precision": "bf16"})]),
    ids=str,
)
def test_prices_know_the_work_too(problem: str, choices: dict[str, str | Knob], tmp_path: Path) -> None:
    """That of a direct trace, at other batch sizes and numbers of parts; and so from the disk. What is done once for
    each part before the first (its targets are counted) is as in a step of three parts: much, in models so small."""
    knobs = knobs_of(**choices)
    del knobs["accum=none"]
    sizes = {1: (8, 24, 16), 5: (40, 120, 80)}  # of batches, by parts; the last is scaled
    directly = {
        parts: trace(PROBLEMS[problem], {**knobs, "accum": Parts(parts)}, batch_sizes[-1], A100)
        for parts, batch_sizes in sizes.items()
    }
    for _ in range(2):
        scaler = TraceScaler(PROBLEMS[problem], A100, TraceCache(tmp_path))
        for parts, direct in directly.items():
            *_, scaled = (scaler.trace(knobs, parts, batch_size) for batch_size in sizes[parts])
            assert not scaled.is_direct
            assert flops_of(scaled.trace) == flops_of(direct)
            for stream in STREAMS:
                assert bytes_on(scaled.trace, stream) == pytest.approx(bytes_on(direct, stream), rel=2e-2)
            assert time_on("a100", scaled.trace).step_ms == pytest.approx(time_on("a100", direct).step_ms, rel=1e-2)
