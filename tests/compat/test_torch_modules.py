"""Private names of torch.nn."""

from __future__ import annotations

import torch
from torch import nn

from tests.compat.sentences import needed


def classes(word: str) -> list[type]:
    """The layers of torch.nn that have a word in their name."""
    return [value for name, value in vars(nn).items() if word in name and isinstance(value, type)]


@needed("torch.nn.modules.batchnorm._BatchNorm", by="whoever averages or holds BatchNorm's statistics")
def test_all_kinds_of_batch_norm_have_an_ancestor() -> None:
    from lowvram.compat.torch_modules import BatchNorm

    assert len(classes("BatchNorm")) >= 7
    assert all(issubclass(kind, BatchNorm) for kind in classes("BatchNorm"))
    assert not issubclass(nn.InstanceNorm2d, BatchNorm)


@needed("torch.nn.modules.dropout._DropoutNd", by="the question whether a model draws random numbers")
def test_all_kinds_of_dropout_have_an_ancestor() -> None:
    from lowvram.compat.torch_modules import Dropout

    assert len(classes("Dropout")) >= 6
    assert all(issubclass(kind, Dropout) for kind in classes("Dropout"))
    assert nn.Dropout2d(0.25).p == 0.25


@needed("torch.nn.Module._non_persistent_buffers_set", by="precision=bf16_pure")
def test_buffers_that_are_not_saved_are_known() -> None:
    from lowvram.compat.torch_modules import unsaved_buffers

    module = nn.Module()
    module.register_buffer("saved", torch.zeros(1))
    module.register_buffer("computed", torch.zeros(1), persistent=False)
    assert unsaved_buffers(module) == {"computed"}


@needed("torch._dynamo.eval_frame.OptimizedModule", by="models that are handed over compiled")
def test_what_was_compiled_is_found() -> None:
    from lowvram.compat.torch_modules import inside_compiled

    layer = nn.Linear(2, 2)
    assert inside_compiled(torch.compile(layer)) is layer  # pyright: ignore[reportArgumentType]
    assert inside_compiled(layer) is None


@needed("torch.nn.Module._forward_hooks", by="whoever computes a forward pass again")
def test_layers_of_torch_as_they_are_are_known() -> None:
    from lowvram.compat.torch_modules import is_plain_module

    class Own(nn.Linear):
        """A layer of one's own."""

    hooked, hooked_before = nn.Linear(1, 1), nn.Linear(1, 1)
    hooked.register_forward_hook(lambda *_: None)
    hooked_before.register_forward_pre_hook(lambda *_: None)
    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(1, 1))
    assert is_plain_module(nn.Linear(1, 1))
    assert not any(map(is_plain_module, (Own(1, 1), hooked, hooked_before, parametrized)))


@needed("torch.nn.Module._buffers", by="whoever computes a forward pass again")
def test_the_buffers_of_a_module_are_in_a_dictionary() -> None:
    from lowvram.compat.torch_modules import own_buffers

    norm = nn.BatchNorm1d(2)
    own_buffers(norm)["running_mean"] = torch.ones(2)
    assert norm.running_mean is not None
    assert norm.running_mean.tolist() == [1, 1]
