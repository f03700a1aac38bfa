"""Private names of torch.nn: common base classes of layers, and the buffers that a module doesn't save."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules import batchnorm, dropout

BatchNorm = batchnorm._BatchNorm
"""The base class of all BatchNorms, those of torch.nn and of others, such as apex's SyncBatchNorm.

torch.nn.modules.batchnorm._BatchNorm, since before 1.13: the public classes have no other ancestor in common. Replaced
by a public one, if torch makes one.
"""

RunningNorm = batchnorm._NormBase
"""The base class of all norms that may keep running statistics: BatchNorms and InstanceNorms.

torch.nn.modules.batchnorm._NormBase, since 1.1: as for `BatchNorm`. Replaced by a public one, if torch makes one.
"""

Dropout = dropout._DropoutNd
"""The base class of all dropout layers.

torch.nn.modules.dropout._DropoutNd, since before 1.13: the public classes have no other ancestor in common. Replaced by
a public one, if torch makes one.
"""

FORWARD_PRE_HOOK = "a forward pre-hook"  # among `hooks_of`


def unsaved_buffers(module: nn.Module) -> set[str]:
    """The names of a module's own buffers that its state_dict leaves out.

    Module._non_persistent_buffers_set, since before 1.13: a state_dict would show it too, but hooks may change that.
    Replaced by an argument of `Module.named_buffers`, if torch makes one.
    """
    return module._non_persistent_buffers_set


def inside_compiled(module: nn.Module) -> nn.Module | None:
    """What `torch.compile(module)` has compiled; None for a module that isn't the result of that.

    torch._dynamo.eval_frame.OptimizedModule and its _orig_mod, since 2.0, by their names: importing the class takes a
    second. Replaced by a public attribute, if torch makes one.
    """
    is_compiled = type(module).__name__ == "OptimizedModule" and type(module).__module__.startswith("torch._dynamo")
    return module.get_submodule("_orig_mod") if is_compiled else None


def is_plain_module(module: nn.Module) -> bool:
    """Whether a module is one of torch's own layers as it is, whose forward pass changes no attribute: without hooks,
    and with its class's forward pass.

    Module._forward_hooks and Module._forward_pre_hooks, since before 1.13. Replaced by a public name, if torch makes
    one.
    """
    has_hooks = module._forward_hooks or module._forward_pre_hooks
    return type(module).__module__.startswith("torch.nn.modules.") and not has_hooks and "forward" not in vars(module)


def hooks_of(module: nn.Module) -> list[str]:
    """The kinds of hooks that a call of the module runs, as messages name them.

    Module._forward_pre_hooks, _forward_hooks, _backward_pre_hooks and _backward_hooks, since 2.0. Replaced by public
    names, if torch makes some.
    """
    kinds = {
        FORWARD_PRE_HOOK: module._forward_pre_hooks,
        "a forward hook": module._forward_hooks,
        "a backward pre-hook": module._backward_pre_hooks,
        "a backward hook": module._backward_hooks,
    }
    return [kind for kind, hooks in kinds.items() if hooks]


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The dictionary in which a module holds its own buffers.

    Module._buffers, since before 1.13: assigning an attribute takes longer, and may be overridden. Replaced by a public
    name, if torch makes one.
    """
    return module._buffers


OF_MODULES = frozenset(vars(nn.Module()))  # nn.Module's own attributes
HOLDING = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})  # what a module holds
CALLED = frozenset(name for name in OF_MODULES if name.startswith(("_forward_", "_backward_", "_is_full_backward_")))


def become(module: nn.Module, other: nn.Module) -> None:
    """Have a module compute what another one does, of the same name in the model: it takes the other's class, tensors
    and attributes. Hooks, further attributes and the mode stay, and whoever holds the module holds the new one.

    The names of the dictionaries in which nn.Module keeps tensors, since before 1.13. Replaced by nothing:
    `set_submodule` leaves hooks, and references in lists, with the old module.
    """
    own = {name: value for name, value in vars(other).items() if name in HOLDING or name not in OF_MODULES}
    vars(module).update(own)
    module.__class__ = type(other)


def put_around(module: nn.Module, wrapper: nn.Module, attribute: str) -> nn.Module:
    """Have a module's own object become a wrapper around what the module is now, so that whoever holds the module calls
    the wrapper. Hooks that a call runs go to the wrapper; further attributes are found at both.

    Args:
        wrapper: whose `attribute` is the module.

    Returns:
        What the module is now, as an object of its own.

    The names of nn.Module's own attributes, as of `become`, since before 1.13. Replaced by nothing.
    """
    inner = wrapper
    first, second = vars(module), vars(wrapper)
    object.__setattr__(module, "__dict__", second)
    object.__setattr__(inner, "__dict__", first)
    module.__class__, inner.__class__ = type(inner), type(module)
    setattr(module, attribute, inner)
    for name in CALLED:
        first[name], second[name] = second[name], first[name]
    second.update({name: value for name, value in first.items() if name not in OF_MODULES and name not in second})
    return inner


def own_parameters(module: nn.Module) -> dict[str, Any]:
    """The dictionary in which a module holds its own parameters, or what stands in for them for the time of a call
    (`torch.func.functional_call`).

    Module._parameters, since before 1.13: it shows which tensors a call reads, and assigning an attribute takes longer.
    Replaced by a public name, if torch makes one.
    """
    return module._parameters
