"""Prices: equal to the traces that they spare, and never taken where they would not be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lowvram.config.errors import Incompatible
from lowvram.core.device import Card
from lowvram.core.knob import Knob
from lowvram.knobs.accum import Parts
from lowvram.knobs.logits import ChunkedLogits
from lowvram.knobs.sharding import PipelineParallel
from lowvram.planning import scaling as repricing
from lowvram.planning.cache import TraceCache, default_folder, key_of
from lowvram.planning.devices import DeviceSpec
from lowvram.planning.estimate import PlanDevice, traffic
from lowvram.planning.scaling import Line, TraceScaler, line_through
from lowvram.planning.target import Target
from lowvram.planning.time.op_cost import Column
from lowvram.planning.trace.events import PHASES, Phase, Trace
from lowvram.planning.trace.tracer import trace
from lowvram.tasks import Auto
from tests.laboratory import PROBLEMS, TOKENS, TRANSFORMER, knobs_of
from tests.tiers import first_of

pytestmark = pytest.mark.medium

DEEP = Auto().pose(replace(TRANSFORMER, num_layers=4), TOKENS)
H100 = Target(Card("H100", (9, 0), 132))


def without_accum(**choices: str | Knob) -> dict[str, Knob]:
    knobs = knobs_of(**choices)
    del knobs["accum=none"]
    return knobs


def traced(problem: Any, knobs: dict[str, Knob], parts: int, batch_size: int, target: Target = H100) -> Trace:
    return trace(problem, {**knobs, "accum": Parts(parts)}, batch_size, target)


@pytest.fixture
def num_traced(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many traces were made so far by a scaler."""
    calls: list[int] = []

    def counted(*args: Any) -> Trace:
        calls.append(1)
        return trace(*args)

    monkeypatch.setattr(repricing, "trace", counted)
    return lambda: len(calls)


CHOICES: list[tuple[dict[str, str | Knob], str]] = [
    ({"precision": "bf16", "ckpt": "every2"}, "transformer_dropout"),
    ({"precision": "fp16", "stepping": "in_backward"}, "resnet"),
    ({"sharding": "fsdp", "stepping": "cpu_offload"}, "resnet"),
]


@pytest.mark.parametrize(("choices", "problem"), first_of(CHOICES), ids=str)
def test_prices_are_those_of_direct_traces(
    choices: dict[str, str | Knob], problem: str, num_traced: Callable[[], int]
) -> None:
    """By kind, by phase and on the host, to the byte; two traces for each number of parts up to three."""
    knobs, target = without_accum(**choices), Target(H100.card, 2 if "sharding" in choices else 1)
    scaler = TraceScaler(PROBLEMS[problem], target)
    for parts, sizes in ((1, (8, 24)), (5, (40, 120))):
        scaled, *_ = [scaler.trace(knobs, parts, batch_size) for batch_size in (sizes[0], 2 * sizes[0], sizes[1])][::-1]
        assert not scaled.is_direct
        assert scaled.why_direct is None
        assert scaled.trace.sums() == traced(PROBLEMS[problem], knobs, parts, sizes[1], target).sums()
    assert num_traced() == 4


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "parts"), [("1f1b", 2, 6), ("1f1b", 2, 9), ("zero_bubble", 2, 6), ("zero_bubble", 3, 12)]
)
def test_a_pipeline_of_many_parts_is_that_of_a_few(
    schedule: str, num_ranks: int, parts: int, num_traced: Callable[[], int]
) -> None:
    """Where passes take turns: memory to the byte, and all that the device computes and sends in its passes."""
    knob, problem = PipelineParallel(schedule=schedule), DEEP if num_ranks > 2 else PROBLEMS["transformer"]
    target = Target(H100.card, num_ranks, knob.row_shape(num_ranks))
    for stage in target.stages():
        scaled = TraceScaler(problem, stage).trace(without_accum(sharding=knob), parts, 2 * parts)
        direct = traced(problem, without_accum(sharding=knob), parts, 2 * parts, stage)
        assert not scaled.is_direct
        found, wanted = scaled.trace.sums(), direct.sums()
        assert (found.peak_bytes, found.by_kind_max) == (wanted.peak_bytes, wanted.by_kind_max)
        assert found.by_phase[Phase.BETWEEN] == pytest.approx(wanted.by_phase[Phase.BETWEEN], abs=512 * parts)  # losses
        for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHTS, Phase.UPDATE):
            works = [each.work[each.work[:, Column.PHASE] == PHASES.index(phase)] for each in (scaled.trace, direct)]
            sums = [(work[:, Column.FLOPS :] * work[:, Column.TIMES, None]).sum(0).tolist() for work in works]
            assert sums[0] == sums[1], phase
    assert num_traced() == num_ranks


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved"])
def test_other_pipelines_are_traced_for_themselves(schedule: str) -> None:
    knob = PipelineParallel(schedule=schedule, stages=2 if schedule == "interleaved" else 1)
    target = Target(None, 2, knob.row_shape(2))
    for stage in target.stages():
        scaled = TraceScaler(DEEP, stage).trace(without_accum(sharding=knob), 6, 12)
        assert scaled.is_direct
        assert scaled.trace.sums() == traced(DEEP, without_accum(sharding=knob), 6, 12, stage).sums()


def test_the_first_batch_size_takes_one_trace(num_traced: Callable[[], int]) -> None:
    scaler = TraceScaler(PROBLEMS["resnet"], H100)
    scaled = [scaler.trace(without_accum(), 1, 8) for _ in range(2)][-1]
    assert scaled.is_direct
    assert num_traced() == 1
    assert scaled.trace.sums() == traced(PROBLEMS["resnet"], without_accum(), 1, 8).sums()


def test_a_much_larger_batch_takes_no_further_trace(num_traced: Callable[[], int]) -> None:
    scaler = TraceScaler(PROBLEMS["resnet"], H100)
    *_, scaled = [scaler.trace(without_accum(), 1, batch_size) for batch_size in (8, 16, 200)]
    assert not scaled.is_direct
    assert num_traced() == 2
    assert scaled.trace.sums() == traced(PROBLEMS["resnet"], without_accum(), 1, 200).sums()


@pytest.mark.parametrize("choices", [{}, {"precision": "bf16", "ckpt": "every1"}], ids=str)
def test_temporary_memory_that_does_not_grow_evenly_takes_no_further_trace(
    choices: dict[str, str | Knob], num_traced: Callable[[], int]
) -> None:
    """That of the gradients of embeddings and norms: with many tokens their kernels work otherwise."""
    scaler, knobs = TraceScaler(PROBLEMS["transformer"], H100), without_accum(**choices)
    for batch_size in (8, 10_000, 7, 100, 251, 1_001, 6_001, 9_999):
        scaled = scaler.trace(knobs, 1, batch_size)
        assert scaled.why_direct is None
        direct = traced(PROBLEMS["transformer"], knobs, 1, batch_size)
        assert scaled.trace.sums() == direct.sums()
        asked, wanted = (sorted(size for _, size, _ in each.requests() if size) for each in (scaled.trace, direct))
        assert asked == wanted
    assert num_traced() <= 4


def test_where_there_is_no_line_to_the_farther_end_there_may_be_one_to_the_nearer(
    num_traced: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def near(ends: dict[int, Trace], card: Card | None) -> Line | str:
        return line_through(ends, card) if max(ends) < 100 else "too far"

    monkeypatch.setattr(repricing, "line_through", near)
    scaler = TraceScaler(PROBLEMS["resnet"], H100)
    *_, scaled = [scaler.trace(without_accum(), 1, batch_size) for batch_size in (8, 16)]
    assert not scaled.is_direct
    assert num_traced() == 3
    assert scaled.trace.sums() == traced(PROBLEMS["resnet"], without_accum(), 1, 16).sums()


def test_what_changes_with_the_batch_is_traced_for_itself() -> None:
    """Chunks of logits: more of them in a larger batch. The price says why."""
    knobs = without_accum(logits=ChunkedLogits(chunk_tokens=256))
    scaler = TraceScaler(PROBLEMS["transformer"], H100)
    assert scaler.trace(knobs, 1, 2).why_direct is None
    scaled = scaler.trace(knobs, 1, 34)
    assert scaled.is_direct
    assert scaled.why_direct == "other tensors are made at another batch size"
    assert scaled.trace.sums() == traced(PROBLEMS["transformer"], knobs, 1, 34).sums()


def test_a_single_sample_is_traced_for_itself() -> None:
    scaler = TraceScaler(PROBLEMS["resnet"], H100)
    scaler.trace(without_accum(), 1, 8)
    scaled = scaler.trace(without_accum(), 1, 1)
    assert scaled.is_direct
    assert "dimensions of one" in (scaled.why_direct or "")
    assert scaled.trace.sums() == traced(PROBLEMS["resnet"], without_accum(), 1, 1).sums()


UNEVEN: list[tuple[dict[str, str | Knob], int, int, int]] = [  # with ranks, parts, and a batch
    ({"sharding": "zero1"}, 3, 6, 64),  # 22 samples on the first rank: 4 parts of 4, 2 of 3
    ({}, 1, 3, 10),
    ({"precision": "bf16", "ckpt": "every2"}, 1, 8, 23),  # 7 parts of 3, 1 of 2
    ({"stepping": "cpu_offload", "sharding": "fsdp"}, 2, 7, 43),  # 22 samples: 1 part of 4, 6 of 3
    ({"sharding": "ddp"}, 4, 1, 33),
]


@pytest.mark.parametrize(("choices", "ranks", "parts", "batch_size"), first_of(UNEVEN), ids=str)
def test_parts_of_unequal_size_are_planned_for_the_rank_with_the_most_samples(
    choices: dict[str, str | Knob], ranks: int, parts: int, batch_size: int, num_traced: Callable[[], int]
) -> None:
    """To the byte, and with all that it computes and sends; from lines, too."""
    knobs, target, problem = without_accum(**choices), Target(H100.card, ranks), PROBLEMS["transformer"]
    scaler = TraceScaler(problem, target)
    sizes = [batch_size + ranks * parts * more for more in (0, 8, 3)]
    *_, scaled = [scaler.trace(knobs, parts, size).trace for size in sizes]
    assert num_traced() == 2
    wanted = traced(problem, knobs, parts, sizes[-1], target)
    for is_steady in (False, True):
        found_sums, wanted_sums = scaled.sums(is_steady), wanted.sums(is_steady)
        assert found_sums.peak_bytes == wanted_sums.peak_bytes
        assert found_sums.by_kind == wanted_sums.by_kind
        assert found_sums.by_kind_max == wanted_sums.by_kind_max
    one, other = ((each.work[:, Column.FLOPS] * each.work[:, Column.TIMES]).sum() for each in (scaled, wanted))
    assert one == other
    device = PlanDevice("card", DeviceSpec(), ranks)
    assert traffic(scaled, device) == traffic(wanted, device)


@pytest.mark.slow
def test_parts_of_unequal_size_whose_passes_follow_one_another_are_traced_for_themselves() -> None:
    knobs = without_accum(stepping="zeroth_order", optimizer="sgd")
    scaled = TraceScaler(PROBLEMS["transformer"], H100).trace(knobs, 7, 24)
    assert scaled.trace.sums() == traced(PROBLEMS["transformer"], knobs, 7, 24).sums()


def test_many_prices_take_no_more_traces_than_two(num_traced: Callable[[], int]) -> None:
    """Of one number of parts: one of the first size, one of the other end of a line."""
    scaler, knobs = TraceScaler(PROBLEMS["resnet"], H100), without_accum()
    for batch_size in range(64, 8, -1):
        assert scaler.trace(knobs, 1, batch_size).is_direct is (batch_size == 64)
    assert num_traced() == 2


def test_what_is_alike_on_paper_shares_a_trace(num_traced: Callable[[], int], tmp_path: Path) -> None:
    alike: list[dict[str, str | Knob]] = [{}, {"compile": "blocks"}, {"compile": "model"}, {"allocator": "expandable"}]
    scaler = TraceScaler(PROBLEMS["resnet"], H100)
    for choices in alike:
        found = scaler.trace(without_accum(**choices), 1, 8)
        assert found.is_direct
        assert found.trace.sums() == traced(PROBLEMS["resnet"], without_accum(**choices), 1, 8).sums()
    assert num_traced() == 1
    for choices in alike:
        TraceScaler(PROBLEMS["resnet"], H100, TraceCache(tmp_path)).trace(without_accum(**choices), 1, 8)
    assert num_traced() == 2
    scaler.trace(without_accum(ckpt="every1"), 1, 8)
    assert num_traced() == 3


@pytest.mark.parametrize(
    ("problem", "choices", "why"),
    [
        ("transformer", {"compile": "none", "ckpt": "compiler"}, "compile=none ends that"),  # with each other
        ("transformer", {"allocator": "tight"}, "the device is the CPU"),  # with the target
        (
            "transformer_dropout",
            {"compile": "model", "ckpt": "compiler"},
            "draws no random numbers: dropout",
        ),  # with the problem
    ],
    ids=str,
)
def test_a_trace_that_is_shared_hides_no_conflict(
    problem: str, choices: dict[str, str | Knob], why: str, num_traced: Callable[[], int]
) -> None:
    scaler = TraceScaler(PROBLEMS[problem], H100)
    scaler.trace(without_accum(), 1, 8)
    with pytest.raises(Incompatible, match=why):
        scaler.trace(without_accum(**choices), 1, 8)
    assert num_traced() == 1


def test_a_store_spares_the_next_process_the_trace(tmp_path: Path, num_traced: Callable[[], int]) -> None:
    first, second = (TraceScaler(PROBLEMS["resnet"], H100, TraceCache(tmp_path)) for _ in range(2))
    found = [scaler.trace(without_accum(), 1, 8).trace for scaler in (first, second)]
    assert num_traced() == 1
    assert found[0].sums() == found[1].sums()
    assert found[0].largest(9) == found[1].largest(9)
    assert len(list(tmp_path.iterdir())) == 1  # nothing half-written is left


def test_what_was_cut_short_is_traced_anew(tmp_path: Path, num_traced: Callable[[], int]) -> None:
    whole = TraceScaler(PROBLEMS["resnet"], H100, TraceCache(tmp_path)).trace(without_accum(), 1, 8).trace
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:1000])
    for _ in range(2):
        again = TraceScaler(PROBLEMS["resnet"], H100, TraceCache(tmp_path)).trace(without_accum(), 1, 8).trace
        assert again.sums() == whole.sums()
        assert num_traced() == 2


def test_a_trace_in_which_a_bit_was_flipped_does_not_count(tmp_path: Path) -> None:
    """torch reads such a file without a word."""
    kept = TraceCache(tmp_path)
    TraceScaler(PROBLEMS["resnet"], H100, kept).trace(without_accum(), 1, 8)
    (file,) = tmp_path.iterdir()
    data = file.read_bytes()
    assert kept.get(file.name) is not None
    for place in range(0, len(data), len(data) // 50):
        file.write_bytes(data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :])
        assert kept.get(file.name) is None


def test_a_trace_of_something_else_does_not_count(tmp_path: Path, num_traced: Callable[[], int]) -> None:
    whole = TraceScaler(PROBLEMS["resnet"], H100, TraceCache(tmp_path)).trace(without_accum(), 1, 8).trace
    (file,) = tmp_path.iterdir()
    TraceScaler(PROBLEMS["resnet"], H100, TraceCache(tmp_path)).trace(without_accum(), 1, 4)
    (other,) = set(tmp_path.iterdir()) - {file}
    other.replace(file)
    assert (
        TraceScaler(PROBLEMS["resnet"], H100, TraceCache(tmp_path)).trace(without_accum(), 1, 8).trace.sums()
        == whole.sums()
    )
    assert num_traced() == 3


def test_a_store_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = TraceCache(tmp_path / "file" / "folder")
    assert TraceScaler(PROBLEMS["resnet"], H100, store).trace(without_accum(), 1, 8).is_direct


def test_a_key_knows_all_that_matters() -> None:
    knobs, problem = knobs_of(), PROBLEMS["transformer"]
    keys = {
        key_of(problem, knobs, 8, H100),
        key_of(problem, knobs, 9, H100),
        key_of(problem, knobs, 8, Target()),
        key_of(problem, knobs, 8, Target(H100.card, 2)),
        key_of(problem, knobs_of(ckpt="every2"), 8, H100),
        key_of(problem, knobs_of(optimizer="sgd"), 8, H100),
        key_of(PROBLEMS["resnet"], knobs, 8, H100),
        key_of(PROBLEMS["transformer_dropout"], knobs, 8, H100),
    }
    assert len(keys) == 8
    assert None not in keys
    assert key_of(problem, knobs_of(), 8, Target(Card("H100", (9, 0), 132))) in keys


def test_the_place_of_the_store_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOWVRAM_CACHE", str(tmp_path))
    assert default_folder() == tmp_path / "traces"
    monkeypatch.delenv("LOWVRAM_CACHE")
    assert default_folder() == Path.home() / ".cache/lowvram/traces"
