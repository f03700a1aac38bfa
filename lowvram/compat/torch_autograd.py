"""Private names of torch's autograd: what runs now, what will run, and how a tensor came to be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

C: Any = torch._C


def current_node() -> Any:
    """The node of the backward pass that runs now; None outside of one.

    torch._C._current_autograd_node, since 2.0: only autograd knows, and no hook tells it for every operator. Replaced
    by a public name, if torch makes one.
    """
    return C._current_autograd_node()


def will_run(node: Any) -> bool:
    """Whether the backward pass that is under way still runs a node. May be asked inside a backward pass only.

    torch._C._will_engine_execute_node, since 1.13: which nodes a call of `backward` reaches depends on what it was
    called for. Replaced by a public name, if torch makes one.
    """
    return C._will_engine_execute_node(node)


def keeps_graph() -> bool:
    """Whether the backward pass that is under way was called with `retain_graph`, so that it may be walked again.

    torch._C._autograd._get_current_graph_task_keep_graph, since 2.5: a node isn't told. Replaced by an argument of
    `torch.autograd.Function.backward`, if torch makes one.
    """
    return C._autograd._get_current_graph_task_keep_graph()


def version_of(tensor: Tensor) -> int:
    """How often a tensor's memory has been written to in place, also through its views.

    Tensor._version, since before 1.13: torch documents it without making it public. Replaced by a public name, if torch
    makes one.
    """
    return tensor._version


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor that this one is a view of; None if it is no view.

    Tensor._base, since before 1.13: torch documents it without making it public. Replaced by a public name, if torch
    makes one.
    """
    return tensor._base
