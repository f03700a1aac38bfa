"""The memory that stays between two steps, by kind: what can be told at any step, from the live tensors alone.

A ledger tells all kinds, and their course within a step, but costs time. This walks over the tensors that the model and
the optimizer hold, and runs no operator. Activations, inputs and temporaries are freed by then.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor, nn

from lowvram.compat.torch_trees import tree_leaves
from lowvram.core import host
from lowvram.core.kind import Kind
from lowvram.core.peak import rounded


class HasState(Protocol):
    def state_dict(self) -> dict[str, Any]: ...


def held_bytes(model: nn.Module, optimizer: HasState, teacher: nn.Module | None = None) -> dict[Kind, int]:
    """The bytes of parameters (with buffers), gradients and optimizer state; as HOST those of them that knobs keep
    in host memory (without their buffers for copies). Storages count once, rounded as the ledger rounds them. Those of
    a teacher are parameters, too."""
    parameters = list(model.parameters())
    of_teacher = [] if teacher is None else [*teacher.parameters(), *teacher.buffers()]
    tensors_by_kind: dict[Kind, Iterable[Any]] = {
        Kind.PARAMETERS: [*parameters, *model.buffers(), *of_teacher],
        Kind.GRADIENTS: [parameter.grad for parameter in parameters],
        Kind.OPTIMIZER: tree_leaves(optimizer.state_dict()),
    }
    counted, held = set[int](), dict.fromkeys((*tensors_by_kind, Kind.HOST), 0)
    for kind, tensors in tensors_by_kind.items():
        for storage in (storage for each in tensors if isinstance(each, Tensor) for storage in host.storages(each)):
            if id(storage) not in counted:
                counted.add(id(storage))
                held[Kind.HOST if host.is_marked(storage) else kind] += rounded(storage.nbytes())
    return held
