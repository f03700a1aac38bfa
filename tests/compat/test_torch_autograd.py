"""Private names of torch's autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from tests.compat.sentences import needed


def noted(ask: Callable[[], Any], answers: list[Any]) -> Callable[[Tensor], Tensor]:
    """The identity, whose backward pass asks something each time."""

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, input: Tensor) -> Tensor:
            return input.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            answers.append(ask())
            return gradient

    return Noted.apply  # pyright: ignore[reportReturnType]


@needed("torch._C._current_autograd_node", by="the ledger, which tells sums of gradients by it,")
def test_the_node_that_runs_is_known() -> None:
    from lowvram.compat.torch_autograd import current_node

    answers: list[Any] = []
    assert current_node() is None
    noted(lambda: current_node().name(), answers)(torch.ones(2, requires_grad=True)).sum().backward()
    assert answers == ["NotedBackward"]
    assert current_node() is None


@needed("torch._C._will_engine_execute_node", by="logits=chunked of a model with tied weights")
def test_the_nodes_that_will_run_are_known() -> None:
    from lowvram.compat.torch_autograd import will_run

    answers: list[Any] = []
    weight = torch.ones(2, requires_grad=True)
    reached, other = weight * 2, weight * 3
    ask = noted(lambda: (will_run(reached.grad_fn), will_run(other.grad_fn)), answers)
    ask(reached).sum().backward()
    assert answers == [(True, False)]


@needed("torch._C._autograd._get_current_graph_task_keep_graph", by="logits=chunked")
def test_a_graph_that_is_kept_is_known_to_be() -> None:
    from lowvram.compat.torch_autograd import keeps_graph

    answers: list[Any] = []
    loss = noted(keeps_graph, answers)(torch.ones(2, requires_grad=True)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert answers == [True, False]


@needed("torch.Tensor._version", by="offload=activations and stepping=cpu_offload")
def test_changes_in_place_are_counted() -> None:
    from lowvram.compat.torch_autograd import version_of

    tensor = torch.zeros(4)
    before = version_of(tensor)
    tensor.add_(1)
    tensor.view(2, 2).add_(1)
    tensor.detach().add_(1)
    assert version_of(tensor) == before + 3


@needed("torch._C._autograd._unsafe_set_version_counter", by="weights=stream")
def test_a_tensor_of_another_version_is_not_read_in_a_backward_pass() -> None:
    from lowvram.compat.torch_autograd import set_versions, version_of

    weights = [torch.ones(2, requires_grad=True) for _ in range(2)]
    product = (weights[0] * weights[1]).sum()
    set_versions(weights, 7)
    assert [version_of(weight) for weight in weights] == [7, 7]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    set_versions(weights, 0)
    (weights[0] * weights[1]).sum().backward()


@needed("torch.autograd.Variable._execution_engine.queue_callback", by="weights=stream")
def test_what_is_to_run_after_a_backward_pass_runs_before_its_caller_goes_on() -> None:
    from lowvram.compat.torch_autograd import after_backward

    done: list[str] = []
    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(lambda gradient: after_backward(lambda: done.append("after")))
    weight.register_post_accumulate_grad_hook(lambda weight: done.append("accumulated"))
    (weight * 2).sum().backward()
    assert done == ["accumulated", "after"]


@needed("torch.Tensor._base", by="the ledger and offload=activations")
def test_a_view_knows_its_base() -> None:
    from lowvram.compat.torch_autograd import base_of

    tensor = torch.zeros(4)
    assert base_of(tensor) is None
    assert base_of(tensor.view(2, 2)[0]) is tensor


@needed("torch._C._AutoDispatchBelowADInplaceOrView", by="fused operators, which a card compiles once")
def test_below_autograd_nothing_is_recorded() -> None:
    from lowvram.compat.torch_autograd import below_autograd

    weight = torch.ones(2, requires_grad=True)
    with below_autograd():
        assert weight.sin().grad_fn is None
    assert weight.sin().grad_fn is not None


@needed("torch._C._SetExcludeDispatchKeyGuard", by="ckpt=selective")
def test_a_tensor_without_graph_shares_the_version() -> None:
    from lowvram.compat.torch_autograd import version_of, without_graph
    from lowvram.compat.torch_modes import TorchDispatchMode

    kept: list[Tensor] = []

    class Keeping(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = func(*args, **(kwargs or {}))
            kept.append(without_graph(output))
            return output

    ones = torch.ones(2, requires_grad=True)
    with Keeping():
        product = ones * 2
    before = version_of(kept[0])
    product.add_(1)
    assert kept[0].grad_fn is None
    assert kept[0].untyped_storage().data_ptr() == product.untyped_storage().data_ptr()
    assert version_of(kept[0]) == before + 1


@needed("torch.Tensor._backward_hooks", by="models whose parameters have hooks")
def test_hooks_of_a_tensor_go_to_another() -> None:
    from lowvram.compat.torch_autograd import give_hooks, hooks_of_tensor

    old, new = (torch.ones(2, requires_grad=True) for _ in range(2))
    assert hooks_of_tensor(old) == (None, None)
    seen: list[Tensor] = []
    handles = [
        old.register_hook(lambda gradient: gradient * 3),
        old.register_post_accumulate_grad_hook(seen.append),
    ]
    give_hooks(new, *hooks_of_tensor(old))
    new.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == [3, 3]
    assert [each is new for each in seen] == [True]
    for handle in handles:
        handle.remove()
    new.sum().backward()
    assert (new.grad.tolist(), len(seen)) == ([4, 4], 1)


@needed("torch.Tensor.__torch_dispatch__", by="ckpt, whose check reads tensors that have values")
def test_tensors_with_operators_of_their_own_are_known() -> None:
    from lowvram.compat.torch_autograd import has_own_operators

    with FakeTensorMode():
        assert has_own_operators(torch.ones(2))
    assert not has_own_operators(torch.ones(2))
    assert not has_own_operators(torch.nn.Parameter(torch.ones(2)))


@needed("torch._C._autograd._top_saved_tensors_default_hooks", by="ckpt, whose check sees what autograd saves")
def test_the_innermost_hooks_of_saved_tensors_are_known() -> None:
    from lowvram.compat.torch_autograd import saving_hooks

    def pack(tensor: Tensor) -> Tensor:
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        return tensor

    assert saving_hooks() is None
    with saved_tensors_hooks(pack, unpack):
        assert saving_hooks() == (pack, unpack)
