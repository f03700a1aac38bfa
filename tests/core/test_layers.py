"""Layers: which norms and convolutions a model has."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowvram.core.layers import convolutions, layer_norms, rms_norms


class Rms(nn.Module):
    """As most of transformers' models have it: computed in fp32, with a weight of the model's format."""

    def __init__(self, width: int, added: float = 1e-6, offset: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.added, self.offset = added, offset

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float() if hidden.dtype != torch.float64 else hidden
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.added)
        return (self.offset + self.weight) * wide.to(hidden.dtype)


def test_rms_norms_are_found_by_what_they_compute() -> None:
    class ByTheLargest(Rms):
        def forward(self, hidden: Tensor) -> Tensor:
            return self.weight * hidden / (hidden.abs().amax(-1, keepdim=True) + self.added)

    class Refusing(Rms):
        def forward(self, hidden: Tensor) -> Tensor:
            raise RuntimeError("only with two arguments")

    theirs = nn.RMSNorm(8, eps=1e-5)
    hooked, patched = nn.RMSNorm(8, eps=1e-5), nn.RMSNorm(8, eps=1e-5)
    hooked.register_forward_hook(lambda *called: seen.append(called))
    patched.forward = nn.RMSNorm(8, eps=1e-5).forward
    seen: list[object] = []
    model = nn.ModuleList(
        [Rms(8), Rms(8, 1e-3), Rms(8, offset=1), ByTheLargest(8), Refusing(8), theirs, nn.PReLU(8), hooked, patched]
    )
    model = model.to("meta")
    assert rms_norms(model) == {model[0]: 1e-6, model[1]: 1e-3, theirs: 1e-5}
    assert not seen


def test_layer_norms_are_of_one_class_alone() -> None:
    class Derived(nn.LayerNorm):
        pass

    patched = nn.LayerNorm(8)
    patched.forward = lambda input: input
    model = nn.ModuleList([nn.LayerNorm(8), Derived(8), nn.BatchNorm1d(8), nn.RMSNorm(8), patched])
    assert layer_norms(model) == [model[0]]


def test_convolutions_are_of_images_with_zeros_around_them() -> None:
    class Other(nn.Conv2d):
        pass

    images, strided = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, stride=2, padding="valid")
    others = [nn.Conv1d(3, 4, 3), nn.ConvTranspose2d(3, 4, 3), nn.Conv2d(3, 4, 3, padding_mode="circular")]
    assert convolutions(nn.ModuleList([images, *others, Other(3, 4, 3), strided])) == [images, strided]
