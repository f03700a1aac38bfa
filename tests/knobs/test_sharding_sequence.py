"""Split layers between which each rank has a run of each sample's tokens, against one process at the same batch."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import lowvram
from lowvram.config.errors import BadInput, Incompatible
from lowvram.core.assemble import assemble
from lowvram.core.fact import Fact
from lowvram.core.kind import Kind
from lowvram.core.knob import conflicts
from lowvram.core.mesh import data_ranks
from lowvram.core.probes.splits import How
from lowvram.core.shards import whole
from lowvram.data.spec import DataSpec, Modality
from lowvram.knobs.sharding import DDP, FSDP, PipelineParallel, TensorParallel, ZeRO1
from lowvram.knobs.sharding.find_own_tokens import FindOwnTokens
from lowvram.knobs.sharding.find_splits import FindSplits
from lowvram.knobs.sharding.in_threads import Meeting
from lowvram.knobs.sharding.runs_row import RunsRow, Way
from lowvram.knobs.sharding.split_trial import ThreadRow
from lowvram.knobs.stepping import AfterBackward
from lowvram.models.hf import HfConfig
from lowvram.tasks import Auto
from tests.hugging import tiny
from tests.knobs.one_process import Choices, Mesh, check_like_one_process
from tests.knobs.test_sharding import THREE, errors, measured, train_each
from tests.knobs.test_sharding_tensor import ENCODERS, FAMILIES, GROUPED, OF_THREE, known_of_family
from tests.laboratory import CPU, InDouble, knobs_of, named, relative_error, structure_of, train
from tests.ranks import on_ranks
from tests.tiers import first_of

pytestmark = pytest.mark.medium

OWN_TOKENS = partial(TensorParallel, sequence=True)
MANY: list[Choices] = [
    {"optimizer": "sgd", "accum": "x2", "stepping": AfterBackward(clip=0.5)},
    {"optimizer": "adamw", "ckpt": "every2"},
    {"optimizer": "sgd", "logits": "chunked"},
    {"optimizer": "sgd", "tile": "blocks"},
    {"optimizer": "sgd", "depth": "layer_drop"},
]
MESHES: dict[str, Mesh] = {
    "a row of two": (GROUPED, 2, OWN_TOKENS()),
    "a row of three": (OF_THREE, 3, OWN_TOKENS()),  # 8 tokens: 3, 3 and 2
    "two rows": (GROUPED, 4, OWN_TOKENS(tensor=2)),
    "two rows by another name": (GROUPED, 4, DDP(tensor=2, sequence=True)),
    "two rows that share out states": (GROUPED, 4, ZeRO1(tensor=2, sequence=True)),
    "two rows that are sharded": (GROUPED, 4, FSDP(tensor=2, sequence=True)),
    "two rows that are gathered once": (GROUPED, 4, FSDP(tensor=2, sequence=True, reshard_after_forward=False)),
}


@pytest.mark.parametrize("mesh", first_of([*MESHES]))
def test_ranks_that_share_out_tokens_between_layers_train_like_one_process(mesh: str) -> None:
    check_like_one_process(MESHES[mesh], MANY)


@pytest.mark.slow
def test_in_few_bits_the_losses_stay() -> None:
    choices: list[Choices] = [{"precision": "fp32"}, {"precision": "bf16"}, {"optimizer": "adamw_8bit"}]
    wanted = train_each(GROUPED, choices, THREE)
    for found in on_ranks(train_each, GROUPED, [{**each, "sharding": OWN_TOKENS()} for each in choices], THREE):
        for one, other, band in zip(found, wanted, (1e-5, 2e-3, 1e-4), strict=True):
            assert errors(one, other)["losses"] < band


def activations(choices: Choices) -> int:
    return measured(choices)[0].by_kind_max[Kind.ACTIVATIONS]


@pytest.mark.slow
def test_it_saves_activations() -> None:
    """All but the inputs of split layers, and what is between these, which is split already."""
    split, own = (on_ranks(activations, {"sharding": knob})[0] for knob in (TensorParallel(), OWN_TOKENS()))
    assert own < 0.85 * split


def test_outside_of_a_part_a_rank_computes_all_tokens() -> None:
    """Before the first step, and after it."""
    rig = assemble(InDouble(GROUPED), knobs_of(), CPU)
    wanted = {"": rig.model(torch.arange(8)[None]).detach()}
    for before, after in on_ranks(outputs_of_all):
        assert relative_error(before, wanted) < 1e-12
        assert after[""].shape == wanted[""].shape


def outputs_of_all() -> list[dict[str, Tensor]]:
    task = InDouble(GROUPED)
    rig = assemble(task, knobs_of(sharding=OWN_TOKENS()), CPU)
    found = [{"": rig.model(torch.arange(8)[None]).detach()}]
    tokens = torch.arange(8)[None]
    lowvram.step(rig, lowvram.Part(tokens, tokens))
    return [*found, {"": rig.model(tokens).detach()}]


# What can't be had


def test_numbers_and_options_that_do_not_fit() -> None:
    with pytest.raises(BadInput, match=r"sharding\.sequence=true: must be false with sharding\.tensor=1"):
        DDP(sequence=True)
    with pytest.raises(BadInput, match=r"sharding\.sequence=true: must be false with sharding=pipeline"):
        PipelineParallel(tensor=2, sequence=True)
    for group, option in (("tile", "mlp"), ("stepping", "in_backward"), ("compile", "model")):
        knobs = {**named((group, option)), "sharding=fsdp": FSDP(tensor=2, sequence=True)}
        assert conflicts(knobs, {Fact.ONE_RANK: ""}), option
    assert on_ranks(refusal_of_few_tokens) == ["sharding.tensor=2: must be at most the 1 tokens of a sample"] * 2


def refusal_of_few_tokens() -> str:
    rig = assemble(GROUPED, knobs_of(sharding=OWN_TOKENS()), CPU)
    tokens = torch.arange(2)[:, None]
    with pytest.raises(BadInput) as refused:
        lowvram.step(rig, lowvram.Part(tokens, tokens))
    return str(refused.value)


# Other people's models


@pytest.mark.parametrize("kind", first_of([*FAMILIES, *ENCODERS], 2))
def test_transformers_classes_can_be_had_so(kind: str) -> None:
    way = known_of_family(kind).get(FindOwnTokens(FindSplits(2)))
    assert way.takes_all == (kind != "gpt2")  # which gives what its blocks make the shape of its inputs


@pytest.mark.parametrize(("kind", "num_ranks"), first_of([("gpt2", 2), ("qwen3:grouped", 2), ("qwen3:grouped", 4)]))
def test_transformers_classes_train_like_one_process(kind: str, num_ranks: int) -> None:
    """Of Qwen 3 also norms that see the features of one rank."""
    task = InDouble(Auto().pose(HfConfig(name=tiny(kind)), DataSpec(Modality.TOKENS, 300, (7,), 300)))
    wanted = train(task, knobs_of(optimizer="sgd"), [8, 8])
    knob = OWN_TOKENS() if num_ranks == 2 else FSDP(tensor=2, sequence=True)
    for found in on_ranks(train, task, knobs_of(optimizer="sgd", sharding=knob), [8, 8], num_ranks=num_ranks):
        assert max(errors(found, wanted)[what] for what in ("losses", "gradients", "parameters")) < 1e-12


WIDTH, LENGTH, LONG = 6, 5, 150
NAMED = "sharding.splits={*.a:columns,*.b:rows}"


class Pair(nn.Module):
    """Two layers that compute each token alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.a(self.norm(x)).tanh_())


class Averaging(Pair):
    """Reads all tokens between layers that aren't split."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.norm(x).mean(1, keepdim=True)


class Pooling(Pair):
    """Reads all tokens between layers that aren't split, where there are many."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + x.mean(1, keepdim=True) if x.shape[1] > LONG else x


class Reshaping(Pair):
    """Computes many tokens with other functions, and the same."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(len(x), -1, WIDTH) if x.shape[1] > LONG else x)


class Net(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList([block(), block()])
        self.tail = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.tail(x)


def token_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")


def largest_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """A sum over samples, but not over their tokens."""
    return nn.functional.cross_entropy(outputs.mT, targets, reduction="none").amax(1).sum()


def trained(options: str) -> dict[str, Tensor]:
    torch.manual_seed(1129)
    model, x = Net(Pair).double(), torch.randn(8, LENGTH, WIDTH).double()
    targets = torch.randint(3, (8, LENGTH))
    task = lowvram.task(model, x, token_losses, blocks="Pair")
    rig = lowvram.assemble(task, f"optimizer=sgd optimizer.lr=0.3 {options}", "cpu")
    mine = slice(8 * data_ranks().rank // data_ranks().size, 8 * (data_ranks().rank + 1) // data_ranks().size)
    for _ in range(3):
        lowvram.step(rig, lowvram.Part(x[mine], targets[mine]))
    return {name: whole(value).clone() for name, value in rig.model.state_dict().items()}


def test_a_model_of_ones_own() -> None:
    wanted = trained("")
    for found in on_ranks(trained, f"sharding=tensor sharding.sequence=true {NAMED}"):
        assert relative_error(found, wanted) < 1e-12


def test_a_model_that_reads_other_tokens_between_layers_is_refused() -> None:
    x = torch.randn(2, LENGTH, WIDTH)
    splits = (("*.a", How.columns), ("*.b", How.rows))
    known = structure_of(lowvram.task(Net(Averaging), x, token_losses, blocks="Averaging"))
    probe = FindSplits(2, splits)
    with pytest.raises(Incompatible, match=r"sharding\.sequence=true: this model doesn't compute the same"):
        known.get(FindOwnTokens(probe))


@pytest.mark.parametrize("block", [Pooling, Reshaping])
def test_a_model_that_computes_long_samples_otherwise_is_refused(block: type[nn.Module]) -> None:
    """The trial is of short ones."""
    splits = (("*.a", How.columns), ("*.b", How.rows))
    task = lowvram.task(Net(block), torch.randn(2, 2 * LONG, WIDTH), token_losses, blocks=block.__name__)
    with pytest.raises(Incompatible, match=r"sharding\.sequence=true: with 300 tokens this model computes otherwise"):
        structure_of(task).get(FindOwnTokens(FindSplits(2, splits)))


@pytest.mark.slow
def test_a_loss_that_is_no_sum_over_tokens_is_refused() -> None:
    assert all("isn't the sum of its tokens'" in said for said in on_ranks(refusal_of_means))


def refusal_of_means() -> str:
    x, targets = torch.randn(4, LENGTH, WIDTH), torch.zeros(4, LENGTH, dtype=torch.long)
    task = lowvram.task(Net(Pair), x, largest_losses, blocks="Pair")
    rig = lowvram.assemble(task, f"sharding=tensor sharding.sequence=true {NAMED}", "cpu")
    with pytest.raises(Incompatible) as refused:
        lowvram.step(rig, lowvram.Part(x, targets))
    return str(refused.value)


# Runs that don't divide


def test_the_first_ranks_have_a_token_more() -> None:
    row = RunsRow(ThreadRow(Meeting(3), 2), Way(takes_all=True))
    assert row.own_of(8) == slice(6, 8)
    row.num_tokens = 8
    assert row.sizes == [3, 3, 2]
