"""Private names of torch's autograd: about the running backward pass, and about views and writes of tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

C: Any = torch._C
DISPATCH = "__torch_dispatch__"
PLAIN_DISPATCH = getattr(Tensor, DISPATCH)


def current_node() -> Any:
    """The autograd node that is running its backward; None outside of a backward pass.

    torch._C._current_autograd_node, since 2.0: no hook gives the node for every operator. Replaced
    by a public name, if torch makes one.
    """
    return C._current_autograd_node()


def will_run(node: Any) -> bool:
    """Whether the running backward pass will still execute a node. Call it inside a backward pass only.

    torch._C._will_engine_execute_node, since 1.13: which nodes a call of `backward` executes depends on its
    arguments. Replaced by a public name, if torch makes one.
    """
    return C._will_engine_execute_node(node)


def keeps_graph() -> bool:
    """Whether the running backward pass was called with `retain_graph`, so that another may follow.

    torch._C._autograd._get_current_graph_task_keep_graph, since 2.5: nodes don't get it. Replaced by an argument of
    `torch.autograd.Function.backward`, if torch makes one.
    """
    return C._autograd._get_current_graph_task_keep_graph()


def version_of(tensor: Tensor) -> int:
    """How often a tensor has been written to in place, also through its views.

    Tensor._version, since before 1.13: torch documents it without making it public. Replaced by a public name, if torch
    makes one.
    """
    return tensor._version


def set_versions(tensors: Collection[Tensor], version: int) -> None:
    """Have tensors tell this version, for memory that somebody writes to of whom autograd doesn't know.

    torch._C._autograd._unsafe_set_version_counter, since 2.6 with several tensors: torch's own shards hide writes so.
    Replaced by a public name, if torch makes one.
    """
    C._autograd._unsafe_set_version_counter(tuple(tensors), (version,) * len(tensors))


def after_backward(call: Callable[[], None]) -> None:
    """Call something when the running backward pass ends, before its caller goes on.

    Variable._execution_engine.queue_callback, since before 1.13: torch's own shards wait for messages so. Replaced by a
    public name, if torch makes one.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)


def without_graph(tensor: Tensor) -> Tensor:
    """The same tensor without a graph, made below autograd. It shares the other's version, so that what is written to
    either in place is noticed in both.

    torch._C._SetExcludeDispatchKeyGuard, since 1.10: a tensor that is detached below autograd has a version of its own.
    Replaced by an argument of `Tensor.detach`, if torch makes one.
    """
    with C._SetExcludeDispatchKeyGuard(C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def has_own_operators(tensor: Tensor) -> bool:
    """Whether a tensor's class decides what operators do with it, so that there may be no memory behind it: fake
    tensors, shards, packed numbers.

    Tensor.__torch_dispatch__, since 1.13: the protocol is documented, its neutral value isn't. Replaced by a public
    check, if torch makes one.
    """
    return getattr(type(tensor), DISPATCH) is not PLAIN_DISPATCH


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor that this one is a view of; None if it is no view.

    Tensor._base, since before 1.13: torch documents it without making it public. Replaced by a public name, if torch
    makes one.
    """
    return tensor._base


def below_autograd() -> AbstractContextManager[object]:
    """Inside it operators go past autograd: nothing is recorded, nor noted as changed in place.

    torch._C._AutoDispatchBelowADInplaceOrView, since 1.12: an operator's own kernel runs so only under a dispatch mode,
    and compiled code is compiled again for it. Replaced by a public name, if torch makes one.
    """
    return C._AutoDispatchBelowADInplaceOrView()


def saving_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """The innermost hooks of saved tensors, to save and to read; None if there are none.

    torch._C._autograd._top_saved_tensors_default_hooks, since 2.5 with this argument: torch calls only the innermost
    hooks, so that others have to call those around them. Replaced by a public name, if torch makes one.
    """
    return C._autograd._top_saved_tensors_default_hooks(False)


def hooks_of_tensor(tensor: Tensor) -> tuple[Any, Any]:
    """The dictionaries of a tensor's hooks: on its gradient, and after its gradient was accumulated. None where there
    never was one.

    Tensor._backward_hooks, since before 1.13, and Tensor._post_accumulate_grad_hooks, since 2.1. Replaced by a public
    name, if torch makes one.
    """
    return tensor._backward_hooks, tensor._post_accumulate_grad_hooks


def give_hooks(tensor: Tensor, on_gradient: Any, after_accumulation: Any) -> None:
    """Give a tensor these dictionaries of hooks, as `hooks_of_tensor` returns them.

    Tensor._backward_hooks, since before 1.13, and Tensor._post_accumulate_grad_hooks, since 2.1: torch's own unpickling
    and copying set them. Replaced by a public name, if torch makes one.
    """
    if on_gradient:
        tensor._backward_hooks = on_gradient
    if after_accumulation:
        tensor._post_accumulate_grad_hooks = after_accumulation
