"""Samples whose tokens are shared out over ranks, against one process at the same logical batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowvram
from lowvram.config.errors import BadInput, Incompatible
from lowvram.core.assemble import assemble
from lowvram.core.fact import Fact
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob, conflicts
from lowvram.core.ledger import ledger
from lowvram.core.mesh import data_ranks, target_ranks
from lowvram.core.probes import token_trial
from lowvram.core.probes.runs import As, Told
from lowvram.core.shards import whole
from lowvram.core.step import step
from lowvram.core.structure import Structure
from lowvram.data.spec import DataSpec, Modality
from lowvram.knobs.sharding import DDP, FSDP, ContextParallel, ZeRO1
from lowvram.knobs.sharding.find_runs import FindRuns
from lowvram.knobs.stepping import AfterBackward
from lowvram.loops.noise_scale import MeasureNoise
from lowvram.models.hf import HfConfig
from lowvram.models.transformer import Positions
from lowvram.tasks import Auto
from tests.hugging import tiny
from tests.knobs.one_process import Choices, Mesh, check_like_one_process
from tests.knobs.test_sharding import THREE, errors
from tests.laboratory import (
    CPU,
    PROBLEMS,
    TOKENS,
    TRANSFORMER,
    InDouble,
    as_packed,
    documents,
    knobs_of,
    make_batch,
    my_slice,
    named,
    relative_error,
    structure_of,
    train,
)
from tests.ranks import on_ranks
from tests.tiers import first_of

pytestmark = pytest.mark.medium

GROUPED = Auto().pose(replace(TRANSFORMER, num_heads=4, num_kv_heads=2), TOKENS)
LEARNED = Auto().pose(replace(TRANSFORMER, positions=Positions.learned), TOKENS)
UNEVEN = Auto().pose(TRANSFORMER, replace(TOKENS, shape=(7,)))
MANY: list[Choices] = [
    {"optimizer": "sgd", "accum": "x2", "stepping": AfterBackward(clip=0.5)},
    {"optimizer": "adamw", "ckpt": "every2"},
    {"optimizer": "sgd", "logits": "chunked", "ckpt": "every1"},
]
MESHES: dict[str, Mesh] = {
    "a row of two": (GROUPED, 2, ContextParallel()),
    "runs of unequal length": (UNEVEN, 2, ContextParallel()),
    "learned positions": (LEARNED, 2, ContextParallel()),
    "two rows": (GROUPED, 4, ContextParallel(context=2)),
    "two rows by another name": (GROUPED, 4, DDP(context=2)),
    "more ranks than heads of keys": (GROUPED, 4, ContextParallel()),
    "sharded over a row": (GROUPED, 2, FSDP(context=None)),
    "sharded over two rows": (GROUPED, 4, FSDP(context=2)),
    "sharded and gathered once": (GROUPED, 4, FSDP(context=2, reshard_after_forward=False)),
    "states shared out over a row": (UNEVEN, 2, ZeRO1(context=None)),
    "states shared out over two rows": (GROUPED, 4, ZeRO1(context=2)),
    "gradients summed once": (GROUPED, 4, ZeRO1(context=2, reduce_every_part=False)),
}


@pytest.mark.parametrize("mesh", first_of([*MESHES]))
def test_ranks_that_share_out_tokens_train_like_one_process(mesh: str) -> None:
    """With clipped norms, parts, recomputed blocks, and a loss in chunks."""
    check_like_one_process(MESHES[mesh], MANY)


OTHERS: dict[str, tuple[Choices, float]] = {  # with the largest relative difference of losses
    "autocast": ({"precision": "bf16"}, 2e-3),
    "loss scaling": ({"precision": "fp16"}, 2e-3),
    "states of few bits": ({"optimizer": "adamw_8bit"}, 1e-4),
    "adapters": ({"adapter": "lora"}, 1e-5),
    "kept on the host": ({"offload": "activations"}, 1e-5),
    "segments": ({"ckpt": "sqrt"}, 1e-5),
    "chosen operators": ({"ckpt": "selective"}, 1e-5),
    "fewer bits of activations": ({"activations": "int8"}, 1e-2),
    "tiles of an MLP": ({"tile": "mlp"}, 1e-5),
}


@pytest.mark.parametrize("name", first_of([*OTHERS]))
def test_other_options_have_the_losses_of_one_process(name: str) -> None:
    choices, band = OTHERS[name]
    wanted = train(GROUPED, knobs_of(**choices), THREE)
    for found in on_ranks(train, GROUPED, knobs_of(**choices, sharding="context"), THREE):
        assert errors(found, wanted)["losses"] < band


# What a rank holds


def activations_of(choices: Choices) -> int:
    """The most that a rank's activations take in a step; of long samples, so that constants don't count."""
    problem = Auto().pose(replace(TRANSFORMER, context=256), replace(TOKENS, shape=(256,)))
    rig, batch = assemble(problem, knobs_of(**choices), CPU), my_slice(make_batch(problem.spec, 2))
    step(rig, batch)
    with ledger(rig.model, rig.stepper, batch.tensors()) as peak:
        step(rig, batch)
    return peak.by_kind_max[Kind.ACTIVATIONS]


def activations_of_each(choices: list[Choices]) -> list[int]:
    return [activations_of(each) for each in choices]


def test_a_rank_has_its_share_of_activations() -> None:
    """Attention's output is kept twice, for all tokens of some heads, and for all heads of some tokens."""
    whole, recomputed = activations_of({}), activations_of({"ckpt": "every1"})
    second_output = 2 * 256 * 16 * 4 // 2  # of each of three blocks, or of the one that is computed again
    found = on_ranks(activations_of_each, [{"sharding": "context"}, {"sharding": "context", "ckpt": "every1"}])
    for shared, shared_and_recomputed in found:
        assert shared <= 0.52 * whole + 3 * second_output
        assert shared_and_recomputed <= 0.52 * recomputed + second_output


# Numbers and options that don't fit


def refusal(problem: Any, knob: Knob, more: Choices) -> str:
    with pytest.raises((BadInput, Incompatible)) as refused:
        assemble(problem, knobs_of(sharding=knob, **more), CPU)
    return str(refused.value)


def test_numbers_that_do_not_divide_are_refused_with_those_that_do() -> None:
    of_three = Auto().pose(replace(TRANSFORMER, num_heads=3, head_width=4), TOKENS)
    for said in on_ranks(refusal, of_three, ContextParallel(), {}):
        assert said == "sharding.context=2: must be a number that divides the model's 3 heads: one of 1, 3"
    with pytest.raises(BadInput, match=r"sharding\.context=3: must be a number that divides the 4 ranks"):
        ContextParallel(context=3).row_shape(4)
    with pytest.raises(BadInput, match=r"sharding\.context=0: must be null, or at least 1"):
        ContextParallel(context=0)
    with pytest.raises(BadInput, match=r"sharding\.context=2: must be 1 with sharding\.tensor above 1"):
        DDP(tensor=2, context=2)
    with pytest.raises(BadInput, match=r"sharding\.context=2: must be 1 with sharding\.replicate above 1"):
        FSDP(context=2, replicate=2)
    six = structure_of(Auto().pose(replace(TRANSFORMER, num_heads=6, num_kv_heads=3, head_width=4), TOKENS))
    with pytest.raises(BadInput, match="6 heads, and those of its 3 heads of keys and values: one of 1, 3, 6"):
        six.get(FindRuns(2))
    with pytest.raises(BadInput, match=r"sharding\.context=9: must be at most the 8 tokens of a sample"):
        structure_of(GROUPED).get(FindRuns(9))


def test_without_compiled() -> None:
    """Compiled code would have to know of the other runs."""
    why = conflicts(named(("sharding", "context"), ("compile", "model")), {Fact.ONE_RANK: ""})
    assert any("runs eagerly" in reason for reason in why)


def test_without_whole_samples() -> None:
    """The noise of samples isn't that of their tokens."""
    knobs = {**named(("sharding", "context")), "train.noise_scale": MeasureNoise()}
    assert any("a rank computes whole samples" in reason for reason in conflicts(knobs, {Fact.ONE_RANK: ""}))


def test_rows_share_out_the_batch() -> None:
    assert ContextParallel(context=2).row_shape(6).context == 2
    assert ContextParallel().row_shape(6).context == 6
    assert DDP().row_shape(6).context == 1


def numbers_of_ranks() -> tuple[int, int]:
    assemble(GROUPED, knobs_of(sharding=ContextParallel(context=2)), CPU)
    return data_ranks().size, target_ranks().size


@pytest.mark.slow
def test_samples_are_shared_out_by_rows_and_targets_by_ranks() -> None:
    assert on_ranks(numbers_of_ranks, num_ranks=4) == [(2, 4)] * 4


# Other models

LONG = DataSpec(Modality.TOKENS, 300, (16,), 300)
FAMILIES = ["gpt2", "qwen3:grouped", "llama:grouped", "gemma:grouped", "gpt_neox", "opt", "mixtral:experts"]


def known_of_family(kind: str, spec: DataSpec = LONG, **changes: Any) -> Structure:
    return structure_of(Auto().pose(HfConfig(name=tiny(kind), args=changes or None), spec))


@pytest.mark.parametrize("kind", first_of(FAMILIES, 2))
def test_decoders_of_transformers_are_told_where_their_tokens_are(kind: str) -> None:
    assert known_of_family(kind).get(FindRuns(2)) == Told("position_ids", As.row)


@pytest.mark.parametrize("kind", first_of(["qwen3:grouped", "gpt2"], 0))
def test_a_decoder_of_transformers_trains_as_on_one_process(kind: str) -> None:
    task = InDouble(Auto().pose(HfConfig(name=tiny(kind), dropout=0.0), LONG))
    choices: Choices = {"optimizer": "sgd", "ckpt": "every1"}
    wanted = train(task, knobs_of(**choices), [4, 4])
    for found in on_ranks(train, task, knobs_of(**choices, sharding="context"), [4, 4]):
        assert max(errors(found, wanted)[what] for what in ("losses", "gradients", "parameters")) < 1e-12


def test_a_window_that_short_samples_do_not_reach_is_refused() -> None:
    """A rank's run would lie within it, and the model would leave it out without a word."""
    assert known_of_family("mistral:grouped").get(FindRuns(2)) is not None
    for length, window, why in (
        (48, 40, "doesn't compute the same"),
        (300, 10, "doesn't compute the same"),
        (300, 200, "300 tokens this model computes otherwise than with 14"),
    ):
        spec = replace(LONG, shape=(length,))
        with pytest.raises(Incompatible, match=why):
            known_of_family("mistral:grouped", spec, sliding_window=window, max_position_embeddings=300).get(
                FindRuns(2)
            )
        ours = replace(TRANSFORMER, context=length, window=window)
        with pytest.raises(Incompatible, match=r"sharding\.context"):
            structure_of(Auto().pose(ours, replace(TOKENS, shape=(length,)))).get(FindRuns(2))


class Alternating(nn.Module):
    """Blocks of one class and of the same weights, the last of which does something else."""

    def __init__(self, last: str) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11)
        self.blocks = nn.ModuleList(Mixer(way) for way in ("attention", "attention", last))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_of_a_large_model_each_kind_of_block_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_trial, "LARGE", 0)
    known = known_of(Alternating("attention"))
    assert [*token_trial.repeated_blocks(known, known.example(2), 12, 12)] == ["blocks.1", "blocks.2"]
    assert known.get(FindRuns(2)) is None
    known = known_of(Alternating("mean"))
    assert [*token_trial.repeated_blocks(known, known.example(2), 12, 12)] == ["blocks.1"]
    with pytest.raises(Incompatible, match="doesn't compute the same"):
        known.get(FindRuns(2))
    assert known_of_family("qwen3:grouped").get(FindRuns(2)) == Told("position_ids", As.row)


def test_packed_rows_are_refused_for_their_mask() -> None:
    packed = as_packed(documents([9, 9], TOKENS), TOKENS)
    with pytest.raises(Incompatible, match=r"gives attention a mask .* loader=bucketed"):
        structure_of(Auto().pose(TRANSFORMER, packed)).get(FindRuns(2))


def test_images_have_no_tokens() -> None:
    with pytest.raises(Incompatible, match="doesn't return a row for each token of what it is given"):
        structure_of(PROBLEMS["resnet"]).get(FindRuns(2))


WIDTH = 8


class Mixer(nn.Module):
    """Has tokens meet in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.qkv, self.merge = way, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.convolution, self.recurrent = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        match self.way:
            case "convolution":
                return x + self.convolution(x.transpose(1, 2)).transpose(1, 2)
            case "recurrence":
                return x + self.recurrent(x)[0]
            case "mean":
                return x + x.mean(1, keepdim=True)
            case "torch's module":
                return x + self.attention(x, x, x, need_weights=False)[0]
            case _:
                q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        if self.way == "products":
            y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.merge((y.flip(2) if self.way == "turned round" else y).transpose(1, 2).flatten(2))


class Foreign(nn.Module):
    """Predicts tokens; knows their positions as it is told, or counts them itself."""

    def __init__(self, way: str = "attention") -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks, self.head = nn.ModuleList(Mixer(way) for _ in range(2)), nn.Linear(WIDTH, 11)

    def forward(self, ids: Tensor, where: Tensor | None = None) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device) if where is None else where)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Counting(Foreign):
    def forward(self, ids: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(ids)


class Pooling(Foreign):
    def forward(self, ids: Tensor, where: Tensor | None = None) -> Tensor:
        return super().forward(ids, where).mean(1)


class Shuffled(Foreign):
    """Each token's place is known from the token itself."""

    def forward(self, ids: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(ids, ids * 2)


IDS = torch.arange(48).view(4, 12) % 11
PLACES = torch.arange(12).expand(4, -1).contiguous()


def known_of(model: nn.Module, inputs: Any = IDS) -> Structure:
    return structure_of(lowvram.task(model, inputs, blocks="Mixer"))


@pytest.mark.parametrize("way", ["convolution", "recurrence", "mean", "products", "turned round"])
def test_tokens_that_meet_elsewhere_are_seen(way: str) -> None:
    with pytest.raises(
        Incompatible, match="doesn't compute the same where each rank has a run of each sample's tokens"
    ):
        known_of(Foreign(way)).get(FindRuns(2, "where"))


def test_positions_are_told_counted_or_not_needed() -> None:
    assert known_of(Foreign("torch's module")).get(FindRuns(2, "where")) == Told("where", As.row)
    assert known_of(Foreign(), {"ids": IDS, "where": PLACES}).get(FindRuns(2)) is None
    assert known_of(Shuffled()).get(FindRuns(2)) is None
    for model in (Foreign(), Counting()):  # nobody knows what `where` is
        with pytest.raises(Incompatible, match=r"needs an argument for them.*sharding\.positions names another"):
            known_of(model).get(FindRuns(2))
    with pytest.raises(
        BadInput, match=r"sharding\.positions='there': must be an argument of the model's forward: .*ids"
    ):
        known_of(Foreign()).get(FindRuns(2, "there"))
    with pytest.raises(Incompatible, match="doesn't return a row for each token"):
        known_of(Pooling()).get(FindRuns(2, "where"))


def by_samples(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of each sample the square of its tokens' summed loss."""
    losses = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view(targets.shape).sum(1).square().sum()


def trained_foreign(options: str, pairs: bool = False) -> dict[str, Tensor]:
    torch.manual_seed(1129)
    model, inputs = Foreign().double(), {"ids": IDS, "where": PLACES} if pairs else IDS
    rig = lowvram.assemble(lowvram.task(model, inputs, blocks="Mixer"), f"optimizer=sgd {options}", "cpu")
    for _ in range(3):
        lowvram.step(rig, lowvram.Part(inputs, IDS.roll(-1, 1)))
    return {name: whole(value).clone() for name, value in rig.model.state_dict().items()}


@pytest.mark.parametrize("pairs", first_of([False, True]))
def test_a_model_of_ones_own_trains_as_on_one_process(pairs: bool) -> None:
    wanted, positions = trained_foreign("ckpt=every1", pairs), "" if pairs else "sharding.positions=where"
    for found in on_ranks(trained_foreign, f"ckpt=every1 sharding=context {positions}", pairs):
        assert relative_error(found, wanted) < 1e-12


def of_whole_samples() -> str:
    task = lowvram.task(Foreign(), {"ids": IDS, "where": PLACES}, by_samples, blocks="Mixer")
    rig = lowvram.assemble(task, "sharding=context", "cpu")
    with pytest.raises(Incompatible) as refused:
        lowvram.step(rig, lowvram.Part({"ids": IDS, "where": PLACES}, IDS))
    return str(refused.value)


def test_a_loss_that_mixes_tokens_is_refused() -> None:
    assert all("the loss of a sample isn't the sum of its tokens'" in said for said in on_ranks(of_whole_samples))
