"""What trains: what no option can train, refused in one sentence, and parameters that rest, which don't train in the
present step of a run, but do in others.

A frozen parameter has `requires_grad` false in all steps, one that rests only until it is woken.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from lowvram.config.errors import Incompatible
from lowvram.core.mesh import tell_once


def check_trainable(model: nn.Module) -> None:
    """Raises Incompatible for a model that can't be trained here."""
    for name, module in model.named_modules():
        where = f"{name or 'the model'} ({type(module).__name__})"
        if isinstance(module, torch.jit.ScriptModule):
            raise Incompatible(f"{where} is compiled by TorchScript: train the module that it was made from")
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise Incompatible(f"{where} makes sparse gradients, which no option here reads: give it sparse=False")
        if any(is_lazy(each) for each in [*module.parameters(recurse=False), *module.buffers(recurse=False)]):
            raise Incompatible(f"{where} has no shapes before its first input: call the model once where it is made")


def check_something_trains(model: nn.Module) -> None:
    """Raises Incompatible if no weight trains. A line says so if the weights that train are in fp16."""
    trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    if not trained:
        count = len([*model.parameters()])
        raise Incompatible(f"no weight of the model trains: requires_grad is false for all of its {count} parameters")
    halves = [name for name, each in trained if each.dtype is torch.float16]
    if halves:
        tell_once(
            f"{len(halves)} of the weights that train are in fp16, such as {halves[0]}: small updates of them are lost"
            " and large ones overflow; make the model in fp32, and choose precision=fp16"
        )


_resting = WeakIdKeyDictionary()


def rest(parameter: nn.Parameter) -> None:
    """Have autograd compute no gradient of the parameter until it is woken."""
    parameter.requires_grad_(False)
    _resting[parameter] = True


def wake(parameter: nn.Parameter) -> None:
    """The inverse of `rest`."""
    parameter.requires_grad_()
    _resting.pop(parameter, None)


def ever_trains(parameter: nn.Parameter) -> bool:
    """Whether the parameter trains at some step of the run."""
    return parameter.requires_grad or parameter in _resting
