"""logits=chunked with tied embeddings: the shared weight's gradient lies in memory once, and is the same to the bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from lowvram.compat.torch_fake import FakeTensorMode
from lowvram.core import lookup
from lowvram.core.assemble import assemble
from lowvram.core.ledger import Peak, ledger
from lowvram.knobs.logits import ChunkedLogits, LazyLogits
from lowvram.knobs.logits.tied import Tie
from tests.laboratory import CPU, PROBLEMS, knobs_of

NUM_CLASSES, WIDTH, SHAPE = 211, 48, (3, 25)


class Model(nn.Module):
    """Embeddings, something between, a last layer with the same weight."""

    def __init__(self, dtype: torch.dtype = torch.float32, between: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_CLASSES, WIDTH, padding_idx=7, dtype=dtype)
        self.again = nn.Embedding(NUM_CLASSES, WIDTH, dtype=dtype)
        self.head = nn.Linear(WIDTH, NUM_CLASSES, bias=False, dtype=dtype)
        self.again.weight = self.head.weight = self.embedding.weight
        self.between = between

    def forward(self, tokens: Tensor) -> Tensor:
        return self.between(self.embedding(tokens) * self.again(tokens.flip(1)))


def loss_of(model: Model, tie: Tie | None) -> Tensor:
    tokens = torch.randint(20, SHAPE, generator=torch.Generator().manual_seed(1))  # most come again, the padding too
    hidden = model(tokens)
    logits = LazyLogits(hidden, model.head, 500, tie.handover_for(hidden) if tie else None)
    return logits.cross_entropy(tokens.roll(1, 1)) / tokens.numel()


def gradient(model: Model, tie: Tie | None) -> Tensor:
    model.zero_grad()
    loss_of(model, tie).backward()
    assert model.head.weight.grad is not None
    return model.head.weight.grad


def make_model(dtype: torch.dtype = torch.float32, between: Callable[[Tensor], Tensor] = torch.tanh) -> Model:
    torch.manual_seed(0)
    return Model(dtype, between)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("numel", [1, 50 * WIDTH, 2**22])
def test_the_gradient_is_the_same_to_the_bit(dtype: torch.dtype, numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "NUMEL_AT_A_TIME", numel)
    wanted, model = gradient(make_model(dtype), None), make_model(dtype)
    assert torch.equal(gradient(model, Tie(model, model.head)), wanted)


def test_a_second_backward_pass_gives_the_same() -> None:
    model = make_model()
    loss = loss_of(model, Tie(model, model.head))
    loss.backward(retain_graph=True)
    assert model.head.weight.grad is not None
    first = model.head.weight.grad.clone()
    loss.backward()
    assert torch.equal(model.head.weight.grad, 2 * first)


def test_a_pass_that_ends_before_the_embeddings_leaves_them_nothing() -> None:
    model = make_model()
    wanted = gradient(model, None).clone()
    kept: list[Tensor] = []
    model.between = lambda looked_up: kept.append(looked_up.tanh()) or kept[0]
    model.zero_grad()
    loss = loss_of(model, Tie(model, model.head))
    torch.autograd.grad(loss, kept, retain_graph=True)
    loss.backward()
    assert model.head.weight.grad is not None
    assert torch.equal(model.head.weight.grad, wanted)


def test_two_losses_of_the_same_hidden_states_add_up() -> None:
    model, tokens = make_model(), torch.arange(20).view(1, 20)
    found = []
    for tie in (None, Tie(model, model.head)):
        model.zero_grad()
        hidden = model(tokens)
        logits = LazyLogits(hidden, model.head, 500, tie.handover_for(hidden) if tie else None)
        (logits.cross_entropy(tokens) + 2 * logits.cross_entropy(tokens.roll(1, 1))).backward()
        assert model.head.weight.grad is not None
        found.append(model.head.weight.grad.clone())
    torch.testing.assert_close(*found)


def test_what_never_gets_back_to_the_embeddings_keeps_its_gradient() -> None:
    """A model that detaches what it looked up: its last layer alone has a gradient."""
    cut = make_model(between=lambda looked_up: looked_up.detach().requires_grad_())
    wanted = gradient(make_model(between=cut.between), None)
    assert wanted.abs().sum() > 0
    assert torch.equal(gradient(cut, Tie(cut, cut.head)), wanted)


def test_embeddings_that_do_more_than_look_up_stay_as_they_are() -> None:
    embedding = nn.Embedding(NUM_CLASSES, WIDTH, max_norm=1.0)
    head = nn.Linear(WIDTH, NUM_CLASSES, bias=False)
    head.weight = embedding.weight
    Tie(nn.ModuleList([embedding, head]), head)
    assert "forward" not in vars(embedding)


def gpt2_peak(is_tied: bool) -> Peak:
    """From the tokens of GPT-2 to its loss and back, without anything between."""
    with FakeTensorMode():
        embedding, head = nn.Embedding(50257, 768), nn.Linear(768, 50257, bias=False)
        head.weight = embedding.weight
        tie = Tie(nn.ModuleList([embedding, head]) if is_tied else nn.Module(), head)
        tokens = torch.zeros(1, 512, dtype=torch.long)
        with ledger(head, inputs=tokens) as peak:
            hidden = embedding(tokens)
            logits = LazyLogits(hidden, head, 32, tie.handover_for(hidden))
            logits.cross_entropy(tokens).backward()
    return peak


def test_the_gradient_of_gpt2_lies_there_once() -> None:
    weight_bytes = 50257 * 768 * 4
    assert gpt2_peak(is_tied=False).peak_bytes > 3 * weight_bytes
    assert gpt2_peak(is_tied=True).peak_bytes < 2.3 * weight_bytes  # the weight, its gradient, a stretch of rows


def test_the_models_tied_embeddings_take_part() -> None:
    """The rig's knob ties what the model has tied, and training goes the plain loop's way."""
    rig = assemble(PROBLEMS["transformer"], knobs_of(logits=ChunkedLogits(7)), CPU)
    assert isinstance(rig.model.get_submodule("token_embedding").forward, partial)
