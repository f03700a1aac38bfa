"""Which layers a model has: linear ones, linear ones by other names, convolutions, layer norms, RMS norms."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lowvram.compat.torch_modes import without_dispatch_modes
from lowvram.compat.torch_modules import FORWARD_PRE_HOOK, hooks_of
from lowvram.config.errors import Incompatible

TRANSPOSED = ("transformers.pytorch_utils", "Conv1D")  # despite its name a linear layer
READS_FIRST = "lowvram_reads_first"  # an attribute of our own layers whose weight is (in, out)


def is_transposed(layer: nn.Module) -> bool:
    """Whether it is a linear layer whose weight is (in, out), as GPT-2's are in transformers, or a part of one."""
    return (type(layer).__module__, type(layer).__name__) == TRANSPOSED or getattr(type(layer), READS_FIRST, False)


def has_own_forward(layer: nn.Module) -> bool:
    """Whether somebody has put another forward pass into this very object: `layer.forward = …`."""
    return "forward" in vars(layer)


def is_plain_linear(layer: nn.Module) -> bool:
    """Whether a call of the layer returns nothing but the product of a weight of its own with what it is given, perhaps
    after a hook before it, and its gradients are that product's."""
    is_linear = type(layer) is nn.Linear and owns_weight(layer) and not has_own_forward(layer)
    return is_linear and {*hooks_of(layer)} <= {FORWARD_PRE_HOOK}


def owns_weight(layer: nn.Module) -> bool:
    """Whether the layer's weight is a parameter of its own, of real numbers, and not computed from others, as by
    `weight_norm`, in its forward pass or before it."""
    named = layer.named_parameters(recurse=False)
    return any(name == "weight" and not weight.is_complex() for name, weight in named)


def require_replaceable(
    model: nn.Module, layers: Collection[nn.Module], uncalled: Collection[str], option: str, mend: str
) -> None:
    """Raises Incompatible if an option would have no effect on one of the layers in whose place it puts another, or
    would drop what the layer does.

    Args:
        uncalled: the answer of `Uncalled`.
        mend: what the user can do.
    """
    names = {module: name for name, module in model.named_modules() if module in layers}
    for layer, name in names.items():
        if name in uncalled:
            raise Incompatible(
                f"{option} would have no effect on {name}: the model computes with {name}.weight instead of calling"
                f" {name}, at least once; {mend}"
            )
        if has_own_forward(layer):
            raise Incompatible(
                f"{option} would drop the forward pass that the model has put into {name} itself ({name}.forward = …):"
                f" make it a class of its own; or {mend}"
            )


def inner_linears(model: nn.Module, last: Collection[Tensor]) -> list[nn.Linear]:
    """Its linear layers, without the last one, without those whose weight is computed, and without classes derived from
    PyTorch's, whose forward pass may be another one.

    Args:
        last: the weights of the last layers (`Structure.last_weights`).
    """
    linears = (module for module in model.modules() if type(module) is nn.Linear and owns_weight(module))
    return [linear for linear in linears if all(linear.weight is not weight for weight in last)]


def convolutions(model: nn.Module) -> list[nn.Conv2d]:
    """Its two-dimensional convolutions that put zeros around an image, without those whose weight is computed, and
    without classes derived from PyTorch's, whose forward pass may be another one."""
    plain = (module for module in model.modules() if type(module) is nn.Conv2d and module.padding_mode == "zeros")
    return [convolution for convolution in plain if owns_weight(convolution)]


def layer_norms(model: nn.Module) -> list[nn.LayerNorm]:
    """Its layer norms, without those whose forward pass may be another one than PyTorch's."""
    norms = [module for module in model.modules() if type(module) is nn.LayerNorm]
    return [norm for norm in norms if not has_own_forward(norm)]


def rms_norms(model: nn.Module) -> dict[nn.Module, float]:
    """Its RMS norms, whatever their class, and what each adds to the mean square. They are found by trial: a module
    that has one weight of one dimension, and computes what an RMS norm does. The model may be on any device."""
    found: dict[nn.Module, float] = {}
    for module in model.modules():
        match [*module.named_parameters(), *module.named_buffers()]:
            case _ if hooks_of(module) or has_own_forward(module):
                pass  # a trial would run code of others
            case [("weight", weight)] if weight.dim() == 1 and not [*module.children()]:
                for eps in [value for value in vars(module).values() if isinstance(value, float)]:
                    if is_rms_norm(module, weight.numel(), eps):
                        found[module] = eps
            case _:
                pass
    return found


@torch.no_grad()
def is_rms_norm(module: nn.Module, width: int, eps: float) -> bool:
    """Whether it computes an RMS norm over the last dimension, some of them so small that `eps` matters."""
    with without_dispatch_modes():
        random = torch.Generator().manual_seed(0)
        x, weight = (torch.randn(size, generator=random) for size in ((2, 3, width), (width,)))
        x[0] *= eps**0.5
        try:
            found = functional_call(module, {"weight": weight}, (x,))
        except Exception:  # of code that we don't know: it isn't an RMS norm
            return False
        wanted = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
        return isinstance(found, Tensor) and found.shape == x.shape and torch.allclose(found, wanted, rtol=1e-5)


class PackedWeight(nn.Module):
    """Its buffers hold the weights, several in one element. They aren't parameters and never train."""

    num_weights: int


def num_packed(model: nn.Module) -> int:
    """The number of packed weights of a model, which its parameters don't include."""
    return sum(module.num_weights for module in model.modules() if isinstance(module, PackedWeight))
