"""The memory that operators take while they run: against figures of torch's allocator, and against the allocator."""

from __future__ import annotations

from collections.abc import Sequence
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
from lowvram.core.kind import Kind
from lowvram.planning.memory.segments import rounded_up
from lowvram.planning.target import Target
from lowvram.planning.trace.attention_scratch import num_parts_of
from lowvram.planning.trace.computed import KINDS
from lowvram.planning.trace.cuda import acts_as_card
from lowvram.planning.trace.reductions import Reduction, buffers_of, reduction_of
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
    assert sum(size for _, size in events if size > 0) == bytes_each * 128 * 50257


# Recorded on an emulated H100, in KiB.
RECORDED: dict[str, list[tuple[int, int]]] = {
    "norm of many rows backward": [
        *[(0, 26250), (1, 820), (2, 820), (3, 432), (3, -432), (4, 432), (1, -820), (2, -820), (4, -432)],
    ],
    "norm of what isn't in one piece": [(0, 1536), (1, 1536), (0, -1536)],
    "norm backward, exchanged gradient": [(0, 1536), (1, 1536), (1, -1536)],
    "RMS norm of what isn't in one piece": [(0, 768), (1, 768), (0, -768)],
    "RMS norm of many rows backward": [(0, 26250), (1, 820), (2, 432), (1, -820), (2, -432)],
    "batch norm in channels_last": [(0, 50176), (1, 1568), (1, -1568)],
    "batch norm in channels_last backward": [(0, 784), (0, -784), (1, 50176)],
    "dropout": [(0, 256), (1, 512)],
    "softmax backward": [(0, 2048), (1, 2048), (1, -2048)],
    "images rolled": [(0, 9408), (1, 9408), (0, -9408)],
    "norms of a few tensors": [(0, 24), (0, -24)],
    "convolution of last input, dense weight": [(0, 2352), (1, 27), (1, -27)],
    "convolution of dense input, last weight, transposed gradient, backward": [
        *[(0, 784), (1, 1568), (2, 784), (0, -784), (1, -1568)],
    ],
    "convolution of dense input, dense weight, transposed gradient, backward of the input alone": [
        *[(0, 784), (1, 1568), (1, -1568)],
    ],
    "embedding of 8192 places in 2 rows, 768 wide, in torch.bfloat16": [
        *[(0, 64), (1, 64), (2, 64), (2, -64), (3, 64), (4, 64), (0, -64), (1, -64), (3, -64), (4, -64)],
    ],
    "efficient, fp32": [
        *[(0, 98304), (1, 98304), (2, 98304), (3, 98304), (4, 1024), (5, 1024), (3, -98304), (4, -1024)],
        *[(6, 131136), (5, -1024), (6, -131136)],
    ],
}


@pytest.mark.parametrize("name", RECORDED)
def test_operators_ask_for_what_torchs_allocator_was_asked_for(name: str) -> None:
    """In the same order, their results included (`Events`)."""
    assert [
        (number, size // KIB if size > 0 else -(-size // KIB)) for number, size in asked(H100, CASES[name])
    ] == RECORDED[name]


def test_a_trace_has_what_operators_take() -> None:
    """None of it on a card whose multiprocessors aren't known; it is alive only while its operator runs."""
    sizes = {}
    for number in (None, 132):
        found = trace(PROBLEMS["transformer"], knobs_of(), 256, Target(Card("Card", (9, 0), number)))
        births = found.computed[found.computed[:, 1] == KINDS.index(Reduction), 0]
        sizes[number] = int(found.num_bytes[births].sum())
        assert (found.num_bytes[births + 2] == 0).all()
        assert all(found.makers[serial] == "sum while it ran" for serial in found.storages[births].tolist()[-3:])
    assert sizes[None] == 0 < sizes[132]


LEAST_BYTES = 16 * KIB  # smaller ones aren't compared: counters, norms' means and the like
# A number of an allocation (0, 1, …), and its bytes as the allocator rounds them: where it is allocated, and negative
# where it is freed.
Events = list[tuple[int, int]]


def asked(card: Card, case: Case) -> Events:
    """What a trace says that an operator and its results ask for while it runs."""
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

    with acts_as_card(card), FakeTensorMode():
        run = case.on("cpu")
        with recorder.recording(), Recording():
            result = run()
            lines = recorder.ledger.lines.copy()
    del result
    sizes: dict[int, int] = {}
    events: list[tuple[int, int]] = []  # serial number and bytes
    for serial, num_bytes in lines:
        events.append((serial, num_bytes if serial not in sizes else -sizes[serial]))
        sizes.setdefault(serial, num_bytes)
    return of_interest(events)


def served(case: Case) -> Events:
    """What torch's allocator is asked for meanwhile."""
    run, signs = case.on("cuda"), {"alloc": 1, "free_requested": -1}
    with allocator_recorded(context=None):
        result = run()
        entries = allocator_snapshot()["device_traces"][0]
    del result
    return of_interest([(entry["addr"], signs.get(entry["action"], 0) * entry["size"]) for entry in entries])


def of_interest(events: Sequence[tuple[int, int]]) -> Events:
    """Without small ones; by number instead of serial number or address. What is freed at once is sorted: its order
    doesn't matter to the allocator."""
    numbers: dict[int, int] = {}
    found: Events = []
    for name, size in events:
        if abs(size) > LEAST_BYTES:
            if size > 0:
                numbers[name] = max(numbers.values(), default=-1) + 1
            found.append((numbers[name], rounded_up(abs(size), 512) * (1 if size > 0 else -1)))
    groups = [list(group) for _, group in groupby(found, key=lambda event: event[1] > 0)]
    return [event for group in groups for event in (group if group[0][1] > 0 else sorted(group))]


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
    assert [number for number, _ in wanted] == [number for number, _ in found]
    assert all(abs(one - other) <= slack for (_, one), (_, other) in zip(wanted, found, strict=True)), (wanted, found)
