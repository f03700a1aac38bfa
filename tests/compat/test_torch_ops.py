"""Private names of torch's operators."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.compat.sentences import needed


def packets_of(run: Callable[[], Any]) -> set[Any]:
    """The operators, whatever their overload, that `run` runs below autograd."""
    packets: set[Any] = set()

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            packets.add(func.overloadpacket)
            return func(*args, **(kwargs or {}))

    with Seeing():
        run()
    return packets


def argument_names(packet: Any) -> list[str]:
    from lowvram.compat.torch_ops import schema_of

    return [argument.name for argument in schema_of(packet.default).arguments]


@needed("torch.ops.aten._scaled_dot_product_…", by="ckpt=selective, mode=plan and the FLOPs of attention")
def test_attention_runs_what_we_know() -> None:
    from lowvram.compat.torch_ops import AttentionOps

    query = torch.rand(1, 2, 8, 16, requires_grad=True)
    seen = packets_of(lambda: F.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward())
    assert AttentionOps.FLASH_ON_CPU in seen & AttentionOps.FUSED
    assert len(seen & AttentionOps.FUSED_BACKWARD) == 1
    for packet in AttentionOps.FUSED:
        assert argument_names(packet)[:3] == ["query", "key", "value"]
        assert {"dropout_p", "is_causal", "scale"} <= set(argument_names(packet))
    for packet in AttentionOps.FUSED_BACKWARD:
        assert argument_names(packet)[1:4] == ["query", "key", "value"]
        assert "is_causal" in argument_names(packet)
    by_products, _ = AttentionOps.MATH(query, query, query, None, 0.0, True)
    torch.testing.assert_close(by_products, F.scaled_dot_product_attention(query, query, query, is_causal=True))


@needed("torch.ops.aten._softmax, _log_softmax, _fused_rms_norm", by="mode=plan, to tell the time of norms,")
def test_softmax_runs_what_we_know() -> None:
    from lowvram.compat.torch_ops import NormOps

    input = torch.rand(2, 3, requires_grad=True)
    seen = packets_of(lambda: (input.softmax(-1) + input.log_softmax(-1)).sum().backward())
    assert {NormOps.SOFTMAX, NormOps.LOG_SOFTMAX} <= seen
    assert len(seen & NormOps.ALL) == 4
    assert NormOps.SOFTMAX_BACKWARD in seen
    assert argument_names(NormOps.SOFTMAX_BACKWARD)[:2] == ["grad_output", "output"]
    made = NormOps.SOFTMAX.default(input, -1, False)
    torch.testing.assert_close(made, input.softmax(-1))
    assert len(NormOps.ALL) == 6


@needed("torch.ops.aten._foreach_norm", by="a plan of clipping")
def test_norms_of_many_run_what_we_know() -> None:
    from lowvram.compat.torch_ops import ManyOps, norms

    assert ManyOps.NORM in packets_of(lambda: norms([torch.ones(3)], torch.float32))


@needed("torch.ops.aten._unsafe_view, _local_scalar_dense, _foreach_…", by="mode=plan, which counts no work for them,")
def test_products() -> None:
    from lowvram.compat.torch_ops import CublasOps

    square = torch.rand(3, 3)
    for compute in (lambda: square @ square, lambda: square @ square[0], lambda: square[None] @ square[None]):
        assert packets_of(compute) & CublasOps.ALL
    assert torch.ops.aten._scaled_mm in CublasOps.ALL


def test_copies_run_what_we_know() -> None:
    from lowvram.compat.torch_ops import CopyOps

    cube = torch.rand(2, 3, 4)
    assert CopyOps.NUMBER in packets_of(cube.sum().item)
    assert CopyOps.VIEW in packets_of(lambda: cube.transpose(0, 2) @ torch.rand(2, 5))
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.SGD([parameter], foreach=True)
    assert CopyOps.ZERO_MANY in packets_of(lambda: optimizer.zero_grad(set_to_none=False))
    CopyOps.COPY_MANY([parameter.detach()], [torch.full((2,), 3.0)])
    assert parameter.tolist() == [3.0, 3.0]


@needed("torch._ops.OpOverload._schema", by="ckpt=selective and mode=plan")
def test_a_schema_tells_what_an_operator_takes_and_writes() -> None:
    from lowvram.compat.torch_ops import schema_of

    plain, in_place = schema_of(torch.ops.aten.add.Tensor), schema_of(torch.ops.aten.add_.Tensor)
    assert [argument.name for argument in plain.arguments] == ["self", "other", "alpha"]
    assert (plain.name, str(plain.arguments[0].type)) == ("aten::add", "Tensor")
    assert plain.returns[0].alias_info is None
    assert plain.arguments[0].alias_info is None
    assert in_place.arguments[0].alias_info.is_write
    assert schema_of(torch.ops.aten.add.out).arguments[-1].is_out


@needed("torch._ops.OpOverload._schema", by="ckpt=selective")
def test_what_an_operator_writes_is_known() -> None:
    from lowvram.compat.torch_ops import written_arguments

    aten = torch.ops.aten
    assert written_arguments(aten.add_.Tensor) == [(0, "self")]
    assert written_arguments(aten.add.Tensor) == []
    assert written_arguments(aten.mv.out) == [(2, "out")]
    assert written_arguments(object()) == []


@needed("torch._foreach_norm", by="the global norm of gradients")
def test_norms_are_those_of_each() -> None:
    from lowvram.compat.torch_ops import norms

    tensors = [torch.tensor([3.0, 4.0], dtype=torch.float16), torch.full((4,), 3e4, dtype=torch.float16)]
    found = norms(tensors, torch.float32)
    assert [(norm.item(), norm.shape, norm.dtype) for norm in found] == [
        (5.0, (), torch.float32),
        (6e4, (), torch.float32),
    ]


@needed("torch._foreach_mul_", by="stepping.clip and precision=fp16")
def test_all_are_multiplied_in_place() -> None:
    from lowvram.compat.torch_ops import multiply_all

    tensors = [torch.ones(2), torch.full((1,), 3.0)]
    multiply_all(tensors, torch.tensor(0.5))
    assert [tensor.tolist() for tensor in tensors] == [[0.5, 0.5], [1.5]]


@needed("torch._foreach_lerp_", by="ema=device")
def test_tensors_are_moved_in_place() -> None:
    from lowvram.compat.torch_ops import move_all

    tensors = [torch.ones(2), torch.full((1,), 3.0)]
    move_all(tensors, [torch.zeros(2), torch.full((1,), 5.0)], 0.5)
    assert [tensor.tolist() for tensor in tensors] == [[0.5, 0.5], [4.0]]


@needed("torch._C._dispatch_get_all_op_names", by="a plan for a card of precision=bf16")
def test_what_autocast_casts_is_listed() -> None:
    from lowvram.compat.torch_ops import operators_with_kernel

    names = operators_with_kernel("AutocastCPU")
    assert {"mm", "conv2d", "scaled_dot_product_attention"} <= set(names)
    assert not {"relu", "view"} & set(names)


@needed("torch._C._ExcludeDispatchKeyGuard", by="a plan for a card of precision=bf16")
def test_a_lifted_autocast_casts_nothing() -> None:
    from lowvram.compat.torch_ops import without_autocast

    matrix = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert (matrix @ matrix).dtype is torch.bfloat16
        with without_autocast():
            assert (matrix @ matrix).dtype is torch.float32
        assert (matrix @ matrix).dtype is torch.bfloat16


@needed("torch.clear_autocast_cache", by="a plan for a card of precision=bf16")
def test_the_end_of_the_outermost_autocast_is_told() -> None:
    from lowvram.compat.torch_ops import on_autocast_end

    ends: list[str] = []
    with on_autocast_end(lambda: ends.append("end")):
        with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
            pass
        assert ends == ["end"]
    with torch.autocast("cpu", torch.bfloat16):
        pass
    assert ends == ["end"]


@needed("torch.library._scoped_library", by="a plan for a card")
def test_kernels_are_replaced_for_a_while() -> None:
    from lowvram.compat.torch_ops import kernels_replaced

    tensor = torch.tensor([-1.0, 2.0])
    with kernels_replaced() as library, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is replaced
        library.impl("relu", lambda input: input * 0 + 7, "AutogradCPU")
        assert tensor.relu().tolist() == [7.0, 7.0]
    assert tensor.relu().tolist() == [0.0, 2.0]
