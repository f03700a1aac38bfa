"""Other people's models on two ranks: as on one process, or a refusal in one sentence."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import redirect_stdout
from io import StringIO

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

import lowvram
from lowvram.config.errors import Incompatible
from lowvram.core.mesh import data_ranks
from lowvram.core.shards import whole
from lowvram.core.states import whole_model
from tests.laboratory import relative_error
from tests.ranks import on_ranks
from tests.restless import CLASSES, WIDTH, Mlp, Net

pytestmark = pytest.mark.medium

SIZE, STEPS = 16, 3
SGD = "optimizer=sgd optimizer.lr=0.3 optimizer.weight_decay=0.1"


class Experts(Net):
    """Its samples take one of two paths, by their first number: all those of a rank the same."""

    def __init__(self) -> None:
        super().__init__(Mlp, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.never = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden, is_second = torch.tanh(self.stem(x)), (x[:, 0] < 0).long()
        for index, expert in enumerate(self.experts):
            rows = (is_second == index).nonzero()[:, 0]
            if len(rows):
                hidden = hidden.index_add(0, rows, expert(hidden[rows]))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Wide(nn.Module):
    """A layer that only samples with a positive first number use; nothing else has its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide, self.back = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 21), nn.Linear(21, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if bool((x[:, 0] > 0).any()):
            rows = (x[:, 0] > 0).nonzero()[:, 0]
            hidden = hidden.index_add(0, rows, self.back(torch.tanh(self.wide(hidden[rows]))))
        return self.head(hidden)


def trained(make: type[nn.Module], options: str = "", signs: int = 1) -> dict[str, Tensor]:
    """The weights and buffers after some steps; each rank has a share of the samples, all of one sign, or with two
    `signs` as many of the first as of the second."""
    torch.manual_seed(1127)
    model, x, targets = make(), torch.randn(SIZE, WIDTH), torch.randint(CLASSES, (SIZE,))
    x[:, 0] = torch.where(torch.arange(SIZE) < SIZE // 2, x[:, 0].abs(), -x[:, 0].abs())
    mine = torch.arange(SIZE).view(signs, data_ranks().size, -1)[:, data_ranks().rank].flatten()
    rig = lowvram.assemble(lowvram.task(model, x, blocks=getattr(model, "of_class", None)), f"{SGD} {options}", "cpu")
    for _ in range(STEPS):
        lowvram.step(rig, lowvram.Part(x[mine], targets[mine]))
    return {name: whole(value).clone() for name, value in rig.model.state_dict().items()}


def check_as_one(*cases: tuple[type[nn.Module], str, str], num_ranks: int = 2, signs: int = 1) -> None:
    """Models with options on several ranks, against options on one."""
    wanted = [trained(make, alone, signs) for make, _, alone in cases]
    on_several = [(make, options) for make, options, _ in cases]
    for of_rank in on_ranks(all_trained, on_several, signs, num_ranks=num_ranks):
        for case, found, each in zip(cases, of_rank, wanted, strict=True):
            for name, value in each.items():
                assert relative_error({name: found[name]}, {name: value}) < 1e-5, (case, name)


def all_trained(cases: list[tuple[type[nn.Module], str]], signs: int) -> list[dict[str, Tensor]]:
    return [trained(make, options, signs) for make, options in cases]


def test_fsdp_counts_a_gradient_that_only_other_ranks_have_as_0() -> None:
    """FSDP2 alone adds up gradients of different weights there, or aborts. What no rank uses stays."""
    at_once = "accum=x2 stepping=in_backward"
    check_as_one((Experts, "sharding=fsdp", ""), (Wide, f"sharding=fsdp {at_once}", at_once))


def test_copies_of_shards_keep_a_gradient_that_only_some_parts_have() -> None:
    """FSDP2 adds up the sums of parts as they lie in memory, whichever weights they are of."""
    copies = "sharding=fsdp sharding.replicate=2 accum=x2"
    together = ("", "stepping=in_backward", "offload=parameters")
    cases = [(Experts, f"{copies} {more}", "accum=x2") for more in together]
    check_as_one(*cases, (Wide, copies, "accum=x2"), (SomeBlocks, copies, "accum=x2"), num_ranks=4, signs=2)


class SomeBlocks(Net):
    """Skips a block where the first sample says so."""

    of_class = "Mlp"

    def __init__(self) -> None:
        super().__init__(Mlp)

    def blocks_for(self, is_other: bool) -> Iterable[nn.Module]:
        return self.blocks[2:] if is_other else self.blocks

    def forward(self, x: Tensor) -> Tensor:
        blocks = self.blocks_for(bool(x[0, 0] < 0))
        x = self.stem(x)
        for block in blocks:
            x = block(x)
        return self.head(x)


class OtherOrder(SomeBlocks):
    def blocks_for(self, is_other: bool) -> Iterable[nn.Module]:
        return reversed(self.blocks) if is_other else self.blocks


def refusals(cases: list[tuple[type[nn.Module], str]]) -> list[str]:
    return [refusal(make, options) for make, options in cases]


def refusal(make: type[nn.Module], options: str) -> str:
    try:
        trained(make, options)
    except Incompatible as error:
        return str(error)
    return "nothing was refused"


def test_ranks_that_compute_different_blocks_are_refused_with_fsdp() -> None:
    """Else they mix the weights of blocks, or one waits for the other. ddp has no such need, nor have layers that trial
    passes leave out, which so belong to no block."""
    for of_rank in on_ranks(refusals, [(OtherOrder, "sharding=fsdp")]):
        for sentence in of_rank:
            assert "all ranks compute the same blocks in the same order" in sentence
            assert "computes blocks." in sentence
            assert "choose sharding=ddp" in sentence
    check_as_one((OtherOrder, "sharding=ddp", "accum=x2"), (SomeBlocks, "sharding=fsdp", "accum=x2"))


class OneBlock(nn.Module):
    """Calls one layer three times, each time under a checkpoint of the kind that computes gradients in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Linear(WIDTH, WIDTH), Mlp(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(3):
            x = checkpoint(self.block, x, use_reentrant=True)
        return self.head(x)


class TwoLosses(nn.Module):
    """Computes gradients of a loss of its own in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.stem(x))
        if self.training and hidden.requires_grad:
            self.head(hidden).square().sum().backward(retain_graph=True)
        return self.head(hidden)


def test_gradients_in_several_pieces_are_refused_with_ddp() -> None:
    """The first piece is on its way by the time that the second is added to it. fsdp sums both."""
    cases = [(OneBlock, "sharding=ddp"), (TwoLosses, "sharding=ddp"), (OneBlock, "sharding=zero1")]
    for of_rank in on_ranks(refusals, cases):
        for sentence, (_, option), name in zip(of_rank, cases, ["block.", "head.", "block."], strict=True):
            assert sentence.startswith(f"{option} sends each gradient")
            assert f"the one of {name}" in sentence
            assert "choose sharding=fsdp" in sentence
    check_as_one((OneBlock, "sharding=fsdp", ""), (TwoLosses, "sharding=fsdp", "accum=x2"))


def whole_after_an_evaluation() -> dict[str, Tensor] | None:
    model = Wide()
    rig = lowvram.assemble(lowvram.task(model, torch.randn(SIZE, WIDTH)), f"{SGD} sharding=fsdp", "cpu")
    lowvram.step(rig, lowvram.Part(torch.randn(SIZE, WIDTH), torch.randint(CLASSES, (SIZE,))))
    with torch.no_grad():
        rig.model(torch.randn(SIZE, WIDTH))
    entire = whole_model(rig.model, Wide)
    assert not isinstance(entire, FSDPModule)
    return None if entire is None else entire.state_dict()


def test_a_model_without_blocks_is_whole_after_an_evaluation() -> None:
    """Which leaves all of it gathered."""
    found, of_the_other = on_ranks(whole_after_an_evaluation)
    assert of_the_other is None
    assert found is not None
    assert {name: tuple(each.shape) for name, each in found.items()} == {
        name: tuple(each.shape) for name, each in Wide().state_dict().items()
    }


class Centred(nn.Module):
    """A running centre and a count of passes of its own, and the statistics of an InstanceNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(2, track_running_stats=True)
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.centre: Tensor
        self.register_buffer("centre", torch.zeros(WIDTH, dtype=torch.complex64))
        self.register_buffer("signs", torch.zeros(WIDTH, dtype=torch.bool), persistent=False)
        self.passes: Tensor
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))
        self.register_buffer("fixed", torch.full((WIDTH,), float("nan")))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(self.norm(x.view(len(x), 2, -1)).flatten(1))
        if self.training:
            self.centre.mul_(0.5).add_(hidden.detach().mean(0) * (1 + 2j))
            self.signs = x.mean(0) > 0
            self.passes.add_(1)
        return self.head(hidden)


def trained_buffers() -> tuple[dict[str, Tensor], dict[str, Tensor], str]:
    torch.manual_seed(data_ranks().rank)
    x, targets = torch.randn(SIZE, WIDTH), torch.randint(CLASSES, (SIZE,))
    torch.manual_seed(1127)
    rig = lowvram.assemble(lowvram.task(Centred(), x), f"{SGD} sharding=ddp", "cpu")
    with redirect_stdout(StringIO()) as said:
        for _ in range(STEPS):
            lowvram.step(rig, lowvram.Part(x, targets))
    own = Centred().norm
    for _ in range(STEPS):
        own(x.view(SIZE, 2, -1))
    return {name: each.clone() for name, each in rig.model.named_buffers()}, dict(own.named_buffers()), said.getvalue()


def test_buffers_that_forward_passes_change_are_the_same_on_all_ranks() -> None:
    """Else the saved model has those of rank 0, and a resumed run goes on with others than it stopped with."""
    (first, own, said), (second, other, nothing) = on_ranks(trained_buffers)
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, rtol=0, atol=0, equal_nan=True)
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(first[f"norm.{name}"], (own[name] + other[name]) / 2)
    assert first["passes"] == STEPS
    assert "note: forward passes change centre, signs, on each rank by its own samples" in said
    assert said.count("note:") == 1
    assert "forward passes" not in nothing
