"""The memory that operators take while they run: against figures of torch's allocator, and against the allocator."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor

from lowvram.compat.torch_cuda import allocator_recorded, allocator_snapshot
from lowvram.compat.torch_fake import FakeTensorMode
from lowvram.compat.torch_modes import TorchDispatchMode
from lowvram.compat.torch_trees import tree_leaves
from lowvram.core.device import Card, card_of
from lowvram.core.knob import Kind
from lowvram.planning.memory.segments import rounded_up
from lowvram.planning.target import Target
from lowvram.planning.trace.attention_scratch import num_parts_of
from lowvram.planning.trace.reductions import buffers_of, reduction_of
from lowvram.planning.trace.tracer import TraceRecorder, trace
from tests.laboratory import IS_EMULATED, PROBLEMS, knobs_of
from tests.planning.trace.operators import CASES, Case, probabilities

H100, RTX3090 = Card("H100", (9, 0), 132), Card("RTX 3090", (8, 6), 82)
KIB, MIB = 2**10, 2**20
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("card", "columns", "mib"),
    [(RTX3090, 768, 48), (RTX3090, 3072, 61.5), (H100, 768, 48), (H100, 3072, 132), (H100, 2304, 132.75)],
)
def test_a_sum_over_rows_takes_what_torchs_allocator_was_asked_for(card: Card, columns: int, mib: float) -> None:
    """Recorded of bf16 training on emulated cards: 8,192 rows, the gradients of GPT-2's biases."""
    rows = torch.empty(8192, columns, dtype=BF16, device="meta")
    assert buffers_of(card, reduction_of(rows, [0], 4))[0] == mib * MIB


def test_short_sums_and_unknown_cards_take_nothing() -> None:
    rows = torch.empty(8192, 768, device="meta")
    assert buffers_of(H100, reduction_of(rows[:64], [0], 4)) == (0, 0)
    assert buffers_of(H100, reduction_of(rows, [1], 4)) == (0, 0)
    assert buffers_of(Card("Unknown", (9, 0)), reduction_of(rows, [0], 4)) == (0, 0)


@pytest.mark.parametrize(
    ("card", "shape", "parts"),
    [
        (H100, (128, 4096, 64), 2),
        (RTX3090, (128, 4096, 64), 6),
        (RTX3090, (32, 384, 256), 3),
        (H100, (768, 1024, 64), 1),
    ],
)
def test_few_queries_split_their_keys(card: Card, shape: tuple[int, int, int], parts: int) -> None:
    """As recorded on emulated cards. Shape (blocks of queries, keys, width)."""
    assert num_parts_of(card, *shape) == parts


@pytest.mark.parametrize(("dtype", "bytes_each"), [(BF16, 4), (FP16, 0), (FP32, 0)])
def test_probabilities_in_fp32_are_made_of_a_copy(dtype: torch.dtype, bytes_each: int) -> None:
    """As recorded of logits=chunked: 24.5 MiB of 128 rows of GPT-2's logits, beside the ledger of torch 2.13."""
    events = asked(H100, Case((128, 50257), dtype, probabilities))
    assert sum(size for kind, size in events if kind == ALLOCATED) == bytes_each * 128 * 50257


# Recorded on an emulated H100; in KiB, freed ones negative.
RECORDED = {
    "norm of many rows backward": [26250, 820, 820, 432, -432, 432, -432, -820, -820, -26250],
    "norm of what isn't in one piece": [1536, 1536, -1536, -1536],
    "norm backward, exchanged gradient": [1536, 1536, -1536, -1536],
    "batch norm in channels_last": [50176, 1568, -1568, -50176],
    "batch norm in channels_last backward": [784, -784, 50176, -50176],
    "dropout": [256, 512, -256, -512],
    "softmax backward": [2048, 2048, -2048, -2048],
    "norms of a few tensors": [24, -24],
    "convolution of last input, dense weight": [2352, 27, -27, -2352],
    "convolution of dense input, last weight, transposed gradient, backward": [784, 1568, 784, -784, -784, -1568],
    "convolution of dense input, dense weight, transposed gradient, backward of the input alone": [
        *[784, 1568, -784, -1568],
    ],
    "embedding of 8192 places in 2 rows, 768 wide, in torch.bfloat16": [64, 64, 64, -64, 64, 64, *[-64] * 4],
    "efficient, fp32": [
        *[98304, 98304, 98304, 98304, 1024, 1024, -1024, -98304, 131136, -1024, *[-98304] * 3, -131136],
    ],
}


@pytest.mark.parametrize("name", RECORDED)
def test_operators_ask_for_what_torchs_allocator_was_asked_for(name: str) -> None:
    """In the same order, their results included."""
    events = [size // KIB * (1 if kind == ALLOCATED else -1) for kind, size in asked(H100, CASES[name])]
    assert events == RECORDED[name]


def test_a_trace_has_what_operators_take() -> None:
    """None of it on a card whose multiprocessors aren't known; it is alive only while its operator runs."""
    sizes = {}
    for number in (None, 132):
        found = trace(PROBLEMS["transformer"], knobs_of(), 256, Target(Card("Card", (9, 0), number)))
        births = found.reductions[:, 0]
        sizes[number] = int(found.num_bytes[births].sum())
        assert (found.num_bytes[births + 2] == 0).all()
        assert all(found.makers[serial] == "sum while it ran" for serial in found.storages[births].tolist()[-3:])
    assert sizes[None] == 0 < sizes[132]


ALLOCATED, FREED = "allocated", "freed"
LEAST_BYTES = 16 * KIB  # smaller ones aren't compared: counters, norms' means and the like
Events = list[tuple[str, int]]  # what happened, and bytes as the allocator rounds them


def asked(card: Card, case: Case) -> Events:
    """What a trace says that an operator and its results ask for."""
    recorder = TraceRecorder(card)

    class Recording(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            num_before = len(recorder.ledger.lines)
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, Tensor):
                    recorder.ledger.note(tensor, Kind.OTHER)
            del recorder.ledger.lines[num_before:]  # arguments are there already
            out = func(*args, **(kwargs or {}))
            recorder.see(func, args, kwargs or {}, out)
            return out

    with FakeTensorMode():
        run = case.on("cpu")
        with recorder.recording(), Recording():
            run()
    sizes: dict[int, int] = {}
    events: Events = []
    for serial, num_bytes in recorder.ledger.lines:
        events.append((ALLOCATED, num_bytes) if serial not in sizes else (FREED, sizes[serial]))
        sizes.setdefault(serial, num_bytes)
    return of_interest(events)


def served(case: Case) -> Events:
    """What torch's allocator is asked for."""
    run = case.on("cuda")
    with allocator_recorded(context=None):
        run()
        entries = allocator_snapshot()["device_traces"][0]
    kinds = {"alloc": ALLOCATED, "free_requested": FREED}
    return of_interest([(kinds[entry["action"]], entry["size"]) for entry in entries if entry["action"] in kinds])


def of_interest(events: Events) -> Events:
    """Without small ones. What is freed at once is sorted: its order doesn't matter to the allocator."""
    rounded = [(kind, rounded_up(size, 512)) for kind, size in events if size > LEAST_BYTES]
    groups = [list(group) for _, group in groupby(rounded, key=lambda event: event[0])]
    return [event for group in groups for event in (sorted(group) if group[0][0] == FREED else group)]


LEAST_CAPABILITIES = {"flash": (8, 0), "cudnn": (9, 0)}
SORTS = ("table", "embedding")  # cub's sort takes some KiB that depend on the card


@pytest.mark.emulated
@pytest.mark.skipif(not IS_EMULATED, reason="not the emulated device")
@pytest.mark.parametrize("name", CASES)
def test_torchs_allocator_serves_the_same(name: str) -> None:
    """In the same order, on the card that is emulated (EMULATED_CARD)."""
    card, kind = card_of(torch.device("cuda")), name.split(",")[0]
    if card.capability < LEAST_CAPABILITIES.get(kind, (0, 0)):
        pytest.skip("the card has no such kernel")
    wanted, found = asked(card, CASES[name]), served(CASES[name])
    slack = 16 * KIB if name.startswith(SORTS) else 0
    assert [event for event, _ in wanted] == [event for event, _ in found]
    assert all(abs(one - other) <= slack for (_, one), (_, other) in zip(wanted, found, strict=True)), (wanted, found)
