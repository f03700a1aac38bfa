"""Private names of torch.nn."""

from __future__ import annotations

from typing import Any

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


@needed("torch.nn.Module._backward_hooks", by="options that put something in a layer's place")
def test_hooks_are_known_by_their_kind() -> None:
    from lowvram.compat.torch_modules import FORWARD_PRE_HOOK, hooks_of

    layer = nn.Linear(1, 1)
    assert hooks_of(layer) == []
    layer.register_forward_pre_hook(lambda *_: None)
    assert hooks_of(layer) == [FORWARD_PRE_HOOK]
    layer.register_forward_hook(lambda *_: None)
    layer.register_full_backward_pre_hook(lambda *_: None)
    layer.register_full_backward_hook(lambda *_: None)
    assert len(hooks_of(layer)) == 4


class Doubled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


@needed("torch.nn.Module._parameters", by="qat, adapter=qlora and precision=fp8")
def test_a_module_becomes_another_and_keeps_hooks_attributes_and_mode() -> None:
    from lowvram.compat.torch_modules import become

    layer: Any = nn.Linear(2, 2).eval()
    layer.tag = "mine"
    handle = layer.register_forward_hook(lambda _, given, output: output + 1)
    other, x = Doubled(2, 3), torch.ones(1, 2)
    become(layer, other)
    assert torch.equal(layer(x), other(x) + 1)
    assert (layer.tag, layer.training, layer.weight is other.weight) == ("mine", False, True)
    handle.remove()
    assert torch.equal(layer(x), other(x))


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * self.inner(x)


@needed("torch.nn.Module._forward_hooks", by="adapter=lora")
def test_a_wrapper_becomes_what_everybody_holds() -> None:
    from lowvram.compat.torch_modules import put_around

    layer: Any = nn.Linear(2, 2)
    layer.tag, seen = "mine", []
    handle = layer.register_forward_hook(lambda module, given, output: seen.append(module))
    weight, x = layer.weight, torch.ones(1, 2)
    plain = nn.functional.linear(x, weight, layer.bias)
    inner = put_around(layer, Around(layer), "inner")
    assert torch.equal(layer(x), 3 * plain)
    assert (type(layer), type(inner), layer.inner, layer.tag) == (Around, nn.Linear, inner, "mine")
    assert [name for name, _ in layer.named_parameters()] == ["inner.weight", "inner.bias"]
    assert seen == [layer]
    handle.remove()
    layer(x)
    assert len(seen) == 1


@needed("torch.nn.modules.batchnorm._NormBase", by="several ranks, whose running statistics are averaged")
def test_all_norms_with_running_statistics_are_known() -> None:
    from lowvram.compat.torch_modules import RunningNorm

    kinds = (nn.BatchNorm1d, nn.BatchNorm3d, nn.InstanceNorm2d, nn.SyncBatchNorm)
    assert all(isinstance(kind(2), RunningNorm) for kind in kinds)
    assert not isinstance(nn.LayerNorm(2), RunningNorm)


@needed("torch.nn.Module._parameters", by="ckpt, which puts back what functional_call gave a block")
def test_what_stands_in_for_parameters_is_seen() -> None:
    from lowvram.compat.torch_modules import own_parameters

    seen: list[dict[str, Any]] = []

    class Layer(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            seen.append(dict(own_parameters(self)))
            return super().forward(input)

    layer, other = Layer(2, 2, bias=False), torch.zeros(2, 2)
    torch.func.functional_call(layer, {"weight": other}, (torch.ones(1, 2),))
    assert seen[0]["weight"] is other
    assert own_parameters(layer)["weight"] is layer.weight
