"""Private names of torch's dispatch modes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from tests.compat.sentences import needed


def seen_inside(kind: type, run: Any) -> list[str]:
    """The operators that a mode of this class sees while `run` is called."""
    seen: list[str] = []

    class Seeing(kind):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    with Seeing():
        run()
    return seen


@needed("torch.utils._python_dispatch.TorchDispatchMode", by="the ledger")
def test_a_mode_sees_operators_of_both_directions() -> None:
    from lowvram.compat.torch_modes import TorchDispatchMode

    tensor = torch.ones((), requires_grad=True)
    seen = seen_inside(TorchDispatchMode, lambda: tensor.sin().backward())
    assert {"aten::sin", "aten::cos"} <= set(seen)
    assert tensor.cos() is not None
    assert seen.count("aten::cos") == 1


@needed("torch.utils._python_dispatch.TorchDispatchMode._should_skip_dynamo", by="a plan, to be made in time,")
def test_a_fast_mode_is_not_guarded() -> None:
    from lowvram.compat.torch_modes import FastDispatchMode, TorchDispatchMode

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))

    fast, guarded = (
        type("Mode", (kind,), {"__torch_dispatch__": dispatch}) for kind in (FastDispatchMode, TorchDispatchMode)
    )
    assert vars(fast)["__torch_dispatch__"] is dispatch
    assert vars(guarded)["__torch_dispatch__"] is not dispatch  # else FastDispatchMode is needed no more
    assert "aten::sin" in seen_inside(FastDispatchMode, torch.ones(2).sin)


@needed("torch.utils._python_dispatch.is_traceable_wrapper_subclass", by="the ledger of sharded tensors")
def test_a_tensor_that_stands_for_others_is_known() -> None:
    from lowvram.compat.torch_modes import is_traceable_wrapper_subclass

    several: Any = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    names, _ = several.__tensor_flatten__()
    assert all(isinstance(getattr(several, name), torch.Tensor) for name in names)
    assert is_traceable_wrapper_subclass(several)
    assert not is_traceable_wrapper_subclass(torch.ones(2))


@needed("torch.utils._python_dispatch._disable_current_modes", by="optimizer=adamw_8bit under a ledger")
def test_a_lifted_mode_sees_nothing() -> None:
    from lowvram.compat.torch_modes import TorchDispatchMode, without_dispatch_modes

    def run() -> None:
        torch.ones(2).sin()
        with without_dispatch_modes():
            torch.ones(2).cos()
        torch.ones(2).tan()

    seen = seen_inside(TorchDispatchMode, run)
    assert {"aten::sin", "aten::tan"} <= set(seen)
    assert "aten::cos" not in seen


@needed("torch._C._len_torch_dispatch_stack", by="what fused operators cost a card's host")
def test_where_there_is_no_mode_none_is_lifted() -> None:
    from lowvram.compat.torch_fake import FakeTensorMode
    from lowvram.compat.torch_modes import is_in_dispatch_mode, without_dispatch_modes

    assert not is_in_dispatch_mode()
    assert isinstance(without_dispatch_modes(), nullcontext)
    with FakeTensorMode():
        assert is_in_dispatch_mode()
        assert not isinstance(without_dispatch_modes(), nullcontext)


@needed("TorchDispatchMode.supports_higher_order_operators", by="ckpt=selective")
def test_a_counting_mode_sees_higher_order_operators() -> None:
    from lowvram.compat.torch_modes import CountingMode, TorchDispatchMode

    assert issubclass(CountingMode, TorchDispatchMode)
    assert TorchDispatchMode.supports_higher_order_operators is False
    assert TorchDispatchMode.ignore_compile_internals() is False
    assert CountingMode.ignore_compile_internals() is True


@needed("torch._C.DisableTorchFunction", by="trials without memory")
def test_functions_can_be_called_unseen() -> None:
    from torch.overrides import TorchFunctionMode

    from lowvram.compat.torch_modes import without_function_modes

    seen: list[str] = []

    class Seeing(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    values = torch.ones(2)
    with Seeing():
        with without_function_modes():
            torch.neg(values)
        assert seen == []
        torch.neg(values)
    assert seen == ["neg"]
