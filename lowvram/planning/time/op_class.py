"""Families of operators. On a device all operators of a family are assumed to run at the same rate."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch

from lowvram.compat.torch_ops import AttentionOps, NormOps
from lowvram.models.flex_attention import NEAR_ATTENTION, NEAR_ATTENTION_BACKWARD

ATEN = torch.ops.aten


class Family(Enum):
    """What an operator mostly does. Rates are in bytes/s for the first three, in FLOP/s for the others."""

    MOVING = "moving"  # bound by reading and writing, such as an addition or a copy
    FUNCTION = "function"  # element-wise with many instructions per element, such as GELU
    NORM = "norm"  # several passes over the same numbers
    PRODUCT = "product"  # a matrix product
    CONVOLUTION = "convolution"
    CONVOLUTION_BACKWARD = "convolution backward"
    ATTENTION = "attention"  # fused
    ATTENTION_BACKWARD = "attention backward"


FAMILIES = list(Family)
CONVOLUTIONS = {Family.CONVOLUTION, Family.CONVOLUTION_BACKWARD}
ATTENTIONS = {Family.ATTENTION, Family.ATTENTION_BACKWARD}
FLOP_FAMILIES = {Family.PRODUCT, *CONVOLUTIONS, *ATTENTIONS}  # whose rates are in FLOP/s

MEMBERS = {
    Family.FUNCTION: {
        ATEN.gelu,
        ATEN.gelu_backward,
        ATEN.silu,
        ATEN.silu_backward,
        ATEN.exp,
        ATEN.log,
        ATEN.erf,
        ATEN.tanh,
        ATEN.sigmoid,
        ATEN.cos,
        ATEN.sin,
    },
    Family.NORM: {
        ATEN.native_layer_norm,
        ATEN.native_layer_norm_backward,
        ATEN.native_batch_norm,
        ATEN.native_batch_norm_backward,
        ATEN.native_group_norm,
        ATEN.native_group_norm_backward,
        *NormOps.ALL,
    },
    Family.CONVOLUTION: {ATEN.convolution},
    Family.CONVOLUTION_BACKWARD: {ATEN.convolution_backward},
    Family.ATTENTION: {*AttentionOps.FUSED, NEAR_ATTENTION},
    Family.ATTENTION_BACKWARD: {*AttentionOps.FUSED_BACKWARD, NEAR_ATTENTION_BACKWARD},
}
BY_PACKET = {packet: family for family, packets in MEMBERS.items() for packet in packets}


def family_of(packet: Any, is_product: bool) -> Family:
    """The family of an operator, whatever its overload.

    Args:
        is_product: whether torch has a formula for its FLOPs.
    """
    return BY_PACKET.get(packet, Family.PRODUCT if is_product else Family.MOVING)
