"""The last layers of models, found by trial, and what models return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowvram
from lowvram.core.layers import inner_linears
from lowvram.core.mesh import tell_once
from lowvram.core.outputs import all_outputs, logits_of
from lowvram.core.probes.blocks import find_blocks
from lowvram.knobs.optimizer import Muon
from lowvram.knobs.optimizer.matrices import roles_of
from lowvram.models.external import ExternalConfig
from lowvram.tasks import External
from tests.models.test_external import WORDS

Forward = Callable[["Model", Tensor], Any]


class Model(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.head, self.other, self.conv = nn.Linear(8, 5), nn.Linear(8, 3), nn.Conv1d(4, 6, 3, padding=1)
        self.scale, self.run = nn.Parameter(torch.ones(5)), forward

    def hidden(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.norm(x + torch.relu(self.second(x)))

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def of(model: Model, x: Tensor) -> Tensor:
    return model.head(model.hidden(x))


FORWARDS: dict[str, tuple[Forward, set[str]]] = {
    "plain": (of, {"head"}),
    "softmax": (lambda m, x: F.log_softmax(of(m, x), -1), {"head"}),
    "softcap": (lambda m, x: 30 * torch.tanh(of(m, x) / 30), {"head"}),
    "scaled": (lambda m, x: of(m, x) * m.scale + m.scale, {"head"}),
    "reshaped": (lambda m, x: of(m, x).double().view(2, 1, 5).transpose(1, 2).squeeze(-1), {"head"}),
    "last position": (lambda m, x: m.head(m.hidden(x)[:, None].expand(-1, 3, -1))[:, -1], {"head"}),
    "two heads": (lambda m, x: {"a": of(m, x), "b": m.other(m.hidden(x))}, {"head", "other"}),
    "side by side": (lambda m, x: torch.cat([of(m, x), m.other(m.hidden(x))], -1), {"head", "other"}),
    "convolution": (lambda m, x: m.conv(m.hidden(x)[:, None].expand(-1, 4, -1)), {"conv"}),
    "product": (lambda m, x: m.hidden(x) @ m.other.weight.t(), {"other"}),
    "einsum": (lambda m, x: torch.einsum("bi,oi->bo", m.hidden(x), m.other.weight), {"other"}),
    "no head": (lambda m, x: m.hidden(x), set()),
}


@pytest.mark.parametrize("kind", FORWARDS)
def test_last_layers_are_found_by_trial(kind: str) -> None:
    forward, wanted = FORWARDS[kind]
    found = find_blocks(Model(forward), all_outputs, torch.randn(2, 8))
    assert set(found.last) == {f"{name}.weight" for name in wanted}


class TiedWords(nn.Module):
    def __init__(self, vocab_size: int = 11) -> None:
        super().__init__()
        self.embed, self.inner, self.out = nn.Embedding(vocab_size, 8), nn.Linear(8, 8), nn.Linear(8, vocab_size)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(self.out(torch.relu(self.inner(self.embed(x)))), -1)


class Separate(TiedWords):
    def __init__(self, vocab_size: int = 11) -> None:
        super().__init__(vocab_size)
        self.out = nn.Linear(8, vocab_size)


@pytest.mark.parametrize("kind", [TiedWords, Separate])
def test_the_last_layer_of_ones_own_model_is_treated_as_such(kind: Any) -> None:
    """By whoever treats it otherwise: matrices' optimizers and rounding, in the API and with task=external."""
    own = lowvram.task(kind(), torch.zeros(2, 4, dtype=torch.long))
    external = External("torch.nn.CrossEntropyLoss").pose(ExternalConfig(f"{__name__}.{kind.__name__}"), WORDS)
    for task in (own, external):
        model: Any = task.make_model()
        last = task.structure(model).last_weights
        assert last == {model.out.weight}
        assert inner_linears(model, last) == [model.inner]
        roles = roles_of(model, last, Muon.layers)
        assert [name for name, each in model.named_parameters() if roles[each].is_matrix] == ["inner.weight"]


def test_that_the_last_layer_is_unknown_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tell_once.cache_clear()
    task = lowvram.task(Model(FORWARDS["no head"][0]), torch.randn(2, 8))
    lowvram.assemble(task, "optimizer=muon", device="cpu")
    assert "optimizer=muon: which layer is the model's last isn't known" in capsys.readouterr().out


# What models return


class Named(NamedTuple):
    loss: Tensor | None
    logits: Tensor


class Fields(NamedTuple):
    loss: Tensor
    out: Tensor


@dataclass
class Data:
    logits: Tensor
    hidden: Tensor | None = None


@dataclass
class Other:
    loss: Tensor | None
    scores: Tensor


def test_logits_are_found_in_what_models_return() -> None:
    logits, loss = torch.ones(2, 3), torch.tensor(1.0)
    for outputs in (
        logits,
        (logits, loss),
        (loss, logits),
        [None, logits],
        {"loss": loss, "logits": logits},
        {"out": logits, "aux": torch.zeros(2, 3)},
        {"loss": None, "out": logits},
        Named(None, logits),
        Named(torch.zeros(2, 3), logits),
        Fields(loss, logits),
        Data(logits, torch.zeros(2, 3)),
        Other(loss, logits),
        SimpleNamespace(hidden=torch.zeros(2, 3), logits=logits),
        SimpleNamespace(loss=None, scores=logits),
    ):
        assert logits_of(outputs) is logits, outputs
