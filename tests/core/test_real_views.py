"""Parameters of unusual kinds: complex, empty, single numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowvram
from lowvram.config.errors import Incompatible
from lowvram.config.registry import options_of
from lowvram.core.rig import Part

KINDS: dict[str, Tensor] = {
    "vector": torch.randn(5, dtype=torch.cfloat),
    "matrix": torch.randn(5, 5, dtype=torch.cfloat) / 3,
    "number": torch.tensor(1 + 0.5j),
    "real number": torch.tensor(0.5),
    "no rows": torch.zeros(0, 8),
    "no columns": torch.zeros(8, 0),
    "nothing": torch.zeros(0),
}
INPUTS, TARGETS = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)), torch.arange(6) % 5


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.weight = nn.Linear(8, 8), nn.Parameter(KINDS[kind].clone())

    def forward(self, x: Tensor) -> Tensor:
        frequencies = torch.fft.rfft(x)
        if self.weight.dim() == 2 and self.weight.is_complex():
            x = torch.fft.irfft(frequencies @ self.weight, n=8)
        elif self.weight.is_complex():
            x = torch.fft.irfft(frequencies * self.weight, n=8)
        else:
            x = x * self.weight.sum() if self.weight.dim() == 0 else x + self.weight.sum()
        return torch.tanh(self.inner(x))


def model_of(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Block(kind), Block(kind), nn.Linear(8, 5))


def trained(kind: str, knobs: str, steps: int = 3) -> Any:
    rig = lowvram.assemble(lowvram.task(model_of(kind), INPUTS), knobs, device="cpu")
    for _ in range(steps):
        loss, _ = lowvram.step(rig, Part(INPUTS, TARGETS))
        assert loss.isfinite()
    rig.stepper.load_state_dict(rig.stepper.state_dict())
    return rig.model


@pytest.mark.parametrize("kind", ["vector", "matrix", "number"])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_complex_weights_train_as_with_torch(kind: str, clip: float | None) -> None:
    model = model_of(kind)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(INPUTS), TARGETS).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    stepping = "" if clip is None else f"stepping=after_backward stepping.clip={clip}"
    sgd = "optimizer=sgd optimizer.lr=0.1 optimizer.momentum=0.9 optimizer.weight_decay=0"
    found = trained(kind, f"{sgd} {stepping}").state_dict()
    for name, wanted in model.state_dict().items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_every_optimizer_trains_every_kind() -> None:
    for option in sorted({*options_of("optimizer")} - {"external"}):
        for kind, start in KINDS.items():
            weight = trained(kind, f"optimizer={option}", steps=2).get_parameter("1.weight")
            assert weight.numel() == 0 or not torch.equal(weight, start), (option, kind)


@pytest.mark.parametrize("knob", ["stepping=cpu_offload", "stepping=in_backward", "offload=parameters"])
def test_what_cannot_train_complex_weights_says_so(knob: str) -> None:
    with pytest.raises(Incompatible, match=rf"^{knob} needs that no weight is complex: 1.weight is"):
        trained("vector", knob)


def with_a_shared_weight() -> nn.Module:
    first, second = Block("vector"), Block("vector")
    for block in (first, second):
        block.weight = nn.Parameter(torch.ones(1))
    second.inner.weight = first.inner.weight
    return nn.Sequential(first, second, nn.Linear(8, 5))


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (model_of("real number"), "1.weight is a single number: make it a vector of one"),
        (model_of("no rows"), r"1.weight of shape \(0, 8\) is empty"),
        (with_a_shared_weight(), "0.inner.weight is in 2 blocks"),
    ],
    ids=["number", "empty", "shared"],
)
def test_weights_that_cannot_be_sharded_are_named(model: nn.Module, told: str) -> None:
    with pytest.raises(Incompatible, match=rf"offload=parameters needs that each weight can be sharded, .*: {told}"):
        lowvram.assemble(lowvram.task(model, INPUTS), "offload=parameters", device="cpu")
