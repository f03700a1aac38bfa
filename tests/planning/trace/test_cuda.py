"""A CPU's tensors as a card's: each trap against what a card is known to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowvram.compat.torch_fake import FakeTensorMode
from lowvram.compat.torch_ops import operators_with_kernel
from lowvram.core.device import Card
from lowvram.core.ledger import Peak, ledger
from lowvram.models.attention import grouped_attention
from lowvram.planning.trace import autocast
from lowvram.planning.trace.cuda import acts_as_card
from tests.laboratory import CPU

A100, T4 = Card("A100", (8, 0)), Card("T4", (7, 5))
KIB, MIB = 2**10, 2**20
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@contextmanager
def on_paper(card: Card | None) -> Iterator[Peak]:
    """The memory of what is made inside, on a card; None: on this CPU, but on paper too."""
    with FakeTensorMode(), ledger(device=CPU) as peak:
        if card is None:
            yield peak
        else:
            with acts_as_card(card):
                yield peak


def made(card: Card | None, make: Any) -> int:
    """Bytes that are alive when `make()` has returned, all that it still holds."""
    with on_paper(card) as peak:
        kept = make()
        del kept
        peak_bytes = torch.empty(0)
    del peak_bytes
    return peak.peak_bytes


def test_lists_of_autocast_are_torchs_own() -> None:
    """The header that torch was built from comes with it."""
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    found = {
        name: {
            f"{op}.{overload}" if overload else op
            for op, overload in re.findall(r"_\((\w+)(?:, (\w+))?\)", text)
            if "dimname" not in overload.lower()  # of named tensors, which torch had until 2.12
        }
        for name, text in re.findall(r"#define AT_FORALL_(\w+)\(_\)(.*?)\n\n|\Z", header, flags=re.S)
    }
    assert set(autocast.LOWER_ON_BOTH) | set(autocast.LOWER) == found["LOWER_PRECISION_FP"]
    assert autocast.cast_by_cuda() & set(autocast.FP32) == found["FP32"]
    assert set(autocast.FP32_OUT) == found["FP32_SET_OPT_DTYPE"]
    assert set(autocast.WIDEST) == found["PROMOTE"]
    assert all(f'"{name}"' in header for name in autocast.FP32_NORM)


def test_what_both_cast_to_fewer_bits_a_cpu_casts_too() -> None:
    assert set(autocast.LOWER_ON_BOTH) <= set(operators_with_kernel("AutocastCPU"))


FORMATS = {
    "norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "softmax": lambda x: x.softmax(-1),
    "sum": lambda x: x.sum(),
    "exp": torch.exp,
    "norm of a vector": lambda x: x.norm(),
    "loss": lambda x: F.mse_loss(x, x),
    "linear": lambda x: F.linear(x, x),
    "product": lambda x: x @ x,
    "gelu": F.gelu,
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "pool": lambda x: F.avg_pool3d(x[None, None, None], 1),
    "widest": lambda x: torch.addcmul(x, x, x.float()),
    "sum of two": lambda x: torch.cat([x, x]),
}
ON_A_CARD: dict[str, torch.dtype] = dict.fromkeys(
    ("norm", "softmax", "sum", "exp", "norm of a vector", "loss", "widest"), FP32
)


@pytest.mark.parametrize("name", FORMATS)
def test_autocast_casts_as_on_a_card(name: str) -> None:
    with FakeTensorMode(), acts_as_card(A100), torch.autocast("cpu", BF16):
        assert FORMATS[name](torch.empty(8, 8, dtype=BF16)).dtype is ON_A_CARD.get(name, BF16)


def test_weights_are_cast_once_in_an_autocast() -> None:
    """Those of operators that only a card's autocast casts, too: here of a cell that is called eight times."""
    width, num_calls = 512, 8

    def called(num: int) -> Any:
        cell, x = torch.nn.GRUCell(width, width), torch.empty(1, width)
        with torch.autocast("cpu", BF16):
            return [cell(x, x) for _ in range(num)]

    once, often = (made(A100, lambda num=num: called(num)) for num in (1, num_calls))
    assert often - once < 6 * width * width * BF16.itemsize


def test_afterwards_the_cpu_has_its_own_ways_again() -> None:
    def formats() -> list[torch.dtype]:
        with torch.autocast("cpu", BF16):
            return [use(torch.ones(8, 8, dtype=BF16)).dtype for use in FORMATS.values()]

    before, mask_bytes = formats(), made(None, lambda: F.dropout(torch.empty(MIB, requires_grad=True), 0.5))
    with pytest.raises(ZeroDivisionError), FakeTensorMode(), acts_as_card(A100):
        _ = 1 / 0
    assert formats() == before
    assert made(None, lambda: F.dropout(torch.empty(MIB, requires_grad=True), 0.5)) == mask_bytes
    assert before[list(FORMATS).index("exp")] is BF16  # the card's way is another


@pytest.mark.parametrize("shape", [(4, 256, 64), (2, 2, 256, 64)])
def test_a_bias_is_added_in_place(shape: tuple[int, ...]) -> None:
    """torch makes another tensor of it only where tensors are of a subclass, as fake ones are (native/Linear.cpp)."""
    inputs_bytes, outputs_bytes = 4 * (4 * 256 * 64 + 256 * 64 + 256), 4 * (4 * 256 * 256)

    def applied() -> Tensor:
        inputs = torch.empty(shape).transpose(0, -2)  # in no order that can be flattened
        return F.linear(inputs, torch.empty(256, 64), torch.empty(256))

    assert made(A100, applied) - inputs_bytes - outputs_bytes in range(outputs_bytes // 2)


@pytest.mark.parametrize(("kind", "num_gates"), [(torch.nn.GRUCell, 3 + 3 + 5), (torch.nn.LSTMCell, 4 + 4 + 4)])
def test_a_recurrent_cell_keeps_its_gates(kind: Any, num_gates: int) -> None:
    """What comes of input and state, and the gates themselves: recorded of GRUCell on an emulated card."""
    batch, width = 64, 256

    def kept() -> Any:
        cell = kind(width, width)
        inputs, states = torch.empty(batch, width), [torch.empty(batch, width) for _ in range(num_states)]
        return cell(inputs, states[0] if num_states == 1 else tuple(states))

    num_states = 1 if kind is torch.nn.GRUCell else 2
    weights = (2 * width + 2) * (3 if num_states == 1 else 4) * width
    others = batch * width * (1 + 2 * num_states)
    assert made(A100, kept) - 4 * (weights + others + num_gates * batch * width) in range(8 * KIB)


@pytest.mark.parametrize(("weight", "bytes_each"), [(BF16, 2), (FP32, 4 + 4 + 4 + 2), (None, 2)])
def test_an_rms_norm_keeps_its_input_and_a_number_for_each_row(weight: torch.dtype | None, bytes_each: int) -> None:
    """Of bf16: with a weight in fp32 it is composed, and keeps what it is composed of."""

    def make() -> Any:
        x = torch.empty(64, 1024, dtype=BF16, requires_grad=True)
        scale = None if weight is None else torch.empty(1024, dtype=weight, requires_grad=True)
        return x, scale, F.rms_norm(x, (1024,), scale)

    given = 64 * 1024 * 2 + (0 if weight is None else 1024 * weight.itemsize)
    numbers = {BF16: 64 * 4, None: 64 * 4, FP32: 2 * 64 * 4}[weight]  # of rows
    assert abs(made(A100, make) - given - 64 * 1024 * bytes_each - numbers) <= 2 * KIB


@pytest.mark.parametrize("shape", [(16,), (8, 16)])
@pytest.mark.parametrize("has_weight", [True, False])
def test_what_is_tried_in_a_plan_is_normed_as_torch_does(shape: tuple[int, ...], has_weight: bool) -> None:
    x = torch.randn(4, 8, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(shape, dtype=torch.float64, requires_grad=True) if has_weight else None
    trained = [x] if weight is None else [x, weight]
    gradient, results = torch.randn_like(x), list[Any]()
    for place in (nullcontext(), acts_as_card(A100)):
        with place:
            found = F.rms_norm(x, shape, weight, 1e-5)
            assert ("Fused" in type(found.grad_fn).__name__) == bool(results)
            results.append((found, *torch.autograd.grad(found, trained, gradient)))
    torch.testing.assert_close(*results)


def test_a_mask_of_dropout_has_one_byte_for_each_number() -> None:
    def drop() -> Tensor:
        return F.dropout(torch.empty(MIB, requires_grad=True), 0.1)

    assert made(A100, drop) == (4 + 4 + 1) * MIB
    assert made(None, drop) > (4 + 4 + 1) * MIB
    with FakeTensorMode(), acts_as_card(A100):
        assert F.dropout(torch.empty(8), 0.1, training=False).shape == (8,)


@pytest.mark.parametrize(("dtype", "bytes_each"), [(FP16, 2 + 4), (BF16, 2 + 4 + 4), (FP32, 4 + 4)])
def test_log_softmax_reads_fp16_in_one_go_but_copies_bf16(dtype: torch.dtype, bytes_each: int) -> None:
    """Of torch 2.13: `log_softmax(dtype=float32)` asks for Half alone."""
    many = torch.Size((1024, 1024))
    assert made(A100, lambda: F.log_softmax(torch.empty(many, dtype=dtype), -1, dtype=FP32)) == bytes_each * MIB


def test_gradients_of_log_softmax_have_the_format_of_what_went_in() -> None:
    with FakeTensorMode(), acts_as_card(A100):
        logits = torch.empty(4, 8, dtype=FP16, requires_grad=True)
        F.log_softmax(logits, -1, dtype=FP32).sum().backward()
        assert logits.grad is not None
        assert logits.grad.dtype is FP16


def attend(dtype: torch.dtype, width: int = 64, dropout: float = 0.0, heads: int = 4, length: int = 1024) -> Tensor:
    query = torch.empty(1, 4, length, width, dtype=dtype, requires_grad=True)
    key, value = (torch.empty(1, heads, length, width, dtype=dtype, requires_grad=True) for _ in range(2))
    return grouped_attention(query, key, value, dropout)


EACH = 4 * 1024 * 64  # elements of a query


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("card", "dtype"), [(A100, BF16), (A100, FP16), (A100, FP32), (T4, FP16), (T4, FP32)])
def test_attention_keeps_output_and_logsumexp(card: Card, dtype: torch.dtype, dropout: float) -> None:
    """No matrix of all pairs, which would be 16 MiB in fp32 here; a few bytes for its seeds."""
    kept = made(card, lambda: attend(dtype, dropout=dropout))
    assert kept - 4 * EACH * dtype.itemsize - 4 * 1024 * 4 in range(4 * KIB)


def test_bf16_has_no_fused_kernel_on_old_cards() -> None:
    assert made(T4, lambda: attend(BF16)) > 4 * 1024 * 1024 * 4


@pytest.mark.parametrize(("dtype", "width", "is_fused"), [(BF16, 256, True), (BF16, 264, True), (FP32, 66, False)])
def test_width_of_a_head_decides_between_kernels(dtype: torch.dtype, width: int, is_fused: bool) -> None:
    """Flash takes up to 256; memory-efficient attention takes more, but only multiples."""
    kept = made(A100, lambda: attend(dtype, width))
    assert (kept < 4 * 4 * 1024 * width * dtype.itemsize + MIB) is is_fused


def test_flash_pads_heads_to_multiples_of_eight() -> None:
    inputs, padded = (4 * 4 * 1024 * width * 2 for width in (60, 64))
    assert made(A100, lambda: attend(BF16, 60)) - inputs * 3 // 4 - padded - 4 * 1024 * 4 in range(4 * KIB)


@pytest.mark.parametrize(("dtype", "copies"), [(BF16, 0), (FP32, 2)])
def test_fewer_heads_of_keys_are_repeated_where_no_kernel_takes_them(dtype: torch.dtype, copies: int) -> None:
    kept = made(A100, lambda: attend(dtype, heads=2))
    itself = (2 + 2 * 0.5) * EACH * dtype.itemsize + 4 * 1024 * 4
    assert kept - itself - copies * EACH * dtype.itemsize in range(4 * KIB)
