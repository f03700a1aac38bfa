"""The choice of attention's kernel: by torch's rules, and torch itself asked on the emulated cards."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowvram.compat.torch_fake import FakeTensorMode
from lowvram.core.attention import attention_of_last
from lowvram.core.device import Card, card_of
from lowvram.planning.time.op_cost import attention_flops
from lowvram.planning.trace.attention import Call, attention, cudnn, efficient, flash, kernel_for, unfused
from lowvram.planning.trace.cuda import acts_as_card
from tests.laboratory import IS_EMULATED

fused_choice: Any = torch.ops.aten._fused_sdp_choice  # returns the place in torch.nn.attention.SDPBackend

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
A100, H100, B200, RTX3090, T4 = (
    Card(name, capability)
    for name, capability in {
        "A100": (8, 0),
        "H100": (9, 0),
        "B200": (10, 0),
        "RTX 3090": (8, 6),
        "T4": (7, 5),
    }.items()
)


def call(dtype: torch.dtype = BF16, device: str = "cpu", **changes: Any) -> Call:
    """Of 4 heads of 64 features, 2 of keys and values if grouped."""
    given = {"width": 64, "value_width": None, "queries": 128, "keys": 128, "mask": None, "dropout": 0.0}
    given |= {"is_causal": False, "grouped": False, "needs_gradient": True, "strided": ()} | changes
    heads, fixed = (2 if given["grouped"] else 4), {"dtype": dtype, "device": device}
    fixed["requires_grad"] = given["needs_gradient"]
    value_width = given["value_width"] or given["width"]
    query = torch.empty(2, 4, given["queries"], given["width"], **fixed)
    key = torch.empty(2, heads, given["keys"], given["width"], **fixed)
    value = torch.empty(2, heads, given["keys"], value_width, **fixed)
    found = Call(
        query, key, value, mask_of(given, dtype, device), given["dropout"], given["is_causal"], None, heads == 2
    )
    return replace(found, **{name: as_columns(getattr(found, name)) for name in given["strided"]})


def as_columns(tensor: Tensor) -> Tensor:
    """The same, but a row's numbers lie apart, as where the pixels of an image are the tokens."""
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


def mask_of(given: dict[str, Any], dtype: torch.dtype, device: str) -> Tensor | None:
    if given["mask"] is None:
        return None
    kind = torch.bool if given["mask"] == "bool" else dtype
    shape = (2, 1, given["queries"], given["keys"])
    return torch.zeros(shape, dtype=kind, device=device, requires_grad=given["mask"] == "trained")


@pytest.mark.parametrize(
    ("card", "changes", "kernel"),
    [
        (H100, {}, cudnn),
        (B200, {}, cudnn),
        (A100, {}, flash),
        (H100, {"dropout": 0.1}, flash),
        (H100, {"dtype": FP32}, efficient),
        (H100, {"mask": "bool"}, cudnn),
        (H100, {"mask": "trained"}, efficient),
        (H100, {"grouped": True}, cudnn),
        (H100, {"width": 256}, cudnn),
        (B200, {"width": 256}, flash),
        (H100, {"keys": 1}, flash),
        (RTX3090, {"width": 200}, efficient),
        (RTX3090, {"width": 256}, flash),
        (RTX3090, {"width": 256, "dropout": 0.1}, efficient),
        (RTX3090, {"grouped": True, "mask": "bool"}, unfused),
        (T4, {"dtype": FP16}, efficient),
        (T4, {"dtype": FP16, "width": 60}, unfused),
        *((H100, {"strided": [name]}, unfused) for name in ("query", "key", "value")),
        (H100, {"strided": ["mask"], "mask": "bool"}, unfused),
        (RTX3090, {"dtype": FP32, "strided": ["value"]}, unfused),
    ],
)
def test_the_kernel_is_the_first_that_can(card: Card, changes: dict[str, Any], kernel: Any) -> None:
    with FakeTensorMode():
        assert kernel_for(card, call(**changes)) is kernel


CHANGES: list[dict[str, Any]] = [
    {},
    {"is_causal": True},
    {"dropout": 0.1},
    {"is_causal": True, "dropout": 0.1},
    *({"mask": mask} for mask in ("bool", "numbers", "trained")),
    {"mask": "bool", "dropout": 0.1},
    *({"width": width} for width in (60, 96, 128, 192, 200, 256, 264)),
    {"width": 256, "dropout": 0.1},
    {"value_width": 128},
    {"width": 192, "value_width": 128, "is_causal": True},
    {"keys": 1},
    {"queries": 1},
    {"queries": 100, "keys": 100},
    {"keys": 256, "is_causal": True},
    {"grouped": True},
    {"grouped": True, "is_causal": True, "dropout": 0.1},
    {"grouped": True, "mask": "bool"},
    *({"strided": [name]} for name in ("query", "key", "value")),
    *({"strided": ["mask"], "mask": mask} for mask in ("bool", "numbers")),
    {"strided": ["query"], "is_causal": True},
    {"strided": ["query", "key", "value"], "width": 1},
]


@pytest.mark.emulated
@pytest.mark.skipif(not IS_EMULATED, reason="not the emulated device")
@pytest.mark.parametrize(("dtype", "needs_gradient"), list(product((BF16, FP16, FP32), (True, False))))
def test_torch_chooses_the_same_kernel(dtype: torch.dtype, needs_gradient: bool) -> None:
    """On the card that is emulated: EMULATED_CARD."""
    card = card_of(torch.device("cuda"))
    for changes in CHANGES:
        asked = call(dtype, "cuda", needs_gradient=needs_gradient, **changes)
        tensors = (asked.query, asked.key, asked.value, asked.mask)
        chosen = fused_choice(*tensors, asked.dropout, asked.is_causal, enable_gqa=asked.is_grouped)
        kernel = [unfused, flash, efficient, cudnn][chosen]
        assert kernel_for(card, asked) is kernel, (os.environ.get("EMULATED_CARD"), dtype, changes)


@pytest.mark.parametrize("is_bool", [True, False])
def test_a_model_that_is_tried_in_a_plan_computes_as_torch_does(is_bool: bool) -> None:
    q, k, v = (torch.randn(2, 3, number, 8, dtype=torch.float64) for number in (4, 6, 6))
    mask = torch.ones(4, 6, dtype=torch.bool).tril(2)
    mask = mask if is_bool else torch.zeros(4, 6, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(attention(A100, q, k, v, mask), F.scaled_dot_product_attention(q, k, v, mask))


@pytest.mark.parametrize(
    ("card", "dtype", "is_flash"), [(A100, BF16, True), (H100, FP16, True), (A100, FP32, False), (T4, FP16, False)]
)
def test_attention_of_the_last_tokens_makes_a_mask_where_the_card_has_no_flash(
    card: Card, dtype: torch.dtype, is_flash: bool
) -> None:
    """(s, t) booleans, or numbers for each of them."""
    seen = list[tuple[int, ...]]()
    with FakeTensorMode(), acts_as_card(card):
        q, k, v = (torch.empty(2, 4, number, 64, dtype=dtype, requires_grad=True) for number in (10, 40, 40))

        def kernel(*args: Any, **named: Any) -> Tensor:
            seen.append(tuple(args[3].shape))
            return F.scaled_dot_product_attention(*args, **named)

        attention_of_last(kernel, q, k, v).sum().backward()
    assert seen == ([] if is_flash else [(10, 40)])


def test_flops_of_the_last_tokens_queries_are_those_of_the_pairs_that_they_see() -> None:
    q, k = torch.empty(1, 1, 10, 8, device="meta"), torch.empty(1, 1, 40, 8, device="meta")
    num_pairs = sum(min(40, 30 + number) for number in range(10))  # and half of the token's own
    assert attention_flops(q, k, k, is_backward=False, is_causal=True) == 2 * 2 * 8 * (num_pairs + 5)
