"""Layers that are split over ranks, against one process at the same logical batch."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import lowvram
from lowvram.config.errors import BadInput, Incompatible
from lowvram.core.assemble import assemble
from lowvram.core.fact import Fact
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob, conflicts
from lowvram.core.mesh import data_ranks
from lowvram.core.probes.splits import How, Split, Splits
from lowvram.core.shards import local, whole
from lowvram.core.structure import Structure
from lowvram.data.spec import DataSpec, Modality
from lowvram.knobs.sharding import DDP, FSDP, TensorParallel, ZeRO1
from lowvram.knobs.sharding.find_splits import FindSplits
from lowvram.knobs.sharding.row import packed_order
from lowvram.knobs.sharding.split_trial import trouble_with
from lowvram.knobs.stepping import AfterBackward
from lowvram.models.hf import HfConfig
from lowvram.tasks import Auto
from tests.calls import Outcome
from tests.hugging import tiny, with_weights
from tests.knobs.one_process import Choices, Mesh, check_like_one_process
from tests.knobs.test_sharding import THREE, errors, measured, train_each
from tests.laboratory import (
    CPU,
    TOKENS,
    TRANSFORMER,
    InDouble,
    knobs_of,
    named,
    relative_error,
    structure_of,
    train,
)
from tests.ranks import on_ranks
from tests.restless import WIDTH, Mlp, Net
from tests.tiers import first_of

pytestmark = pytest.mark.medium

GROUPED = Auto().pose(replace(TRANSFORMER, num_heads=4, num_kv_heads=2), TOKENS)
OF_THREE = Auto().pose(replace(TRANSFORMER, num_heads=3, head_width=4, mlp_width=48), TOKENS)
MANY: list[Choices] = [
    {"optimizer": "sgd", "accum": "x2", "stepping": AfterBackward(clip=0.5)},
    {"optimizer": "adamw", "ckpt": "every2"},
    {"optimizer": "sgd", "logits": "chunked"},
    {"optimizer": "sgd", "depth": "layer_drop"},
]
MESHES: dict[str, Mesh] = {
    "a row of two": (GROUPED, 2, TensorParallel()),
    "a row of three": (OF_THREE, 3, TensorParallel()),
    "two rows": (GROUPED, 4, TensorParallel(tensor=2)),
    "two rows by another name": (GROUPED, 4, DDP(tensor=2)),
    "two rows that are sharded": (GROUPED, 4, FSDP(tensor=2)),
    "two rows that are gathered once": (GROUPED, 4, FSDP(tensor=2, reshard_after_forward=False)),
    "two rows that share out states": (GROUPED, 4, ZeRO1(tensor=2)),
    "two rows that sum gradients once": (GROUPED, 4, ZeRO1(tensor=2, reduce_every_part=False)),
    "three rows that share out states": (GROUPED, 6, ZeRO1(tensor=2)),
    "one row that has all states": (GROUPED, 2, ZeRO1(tensor=2)),
}


@pytest.mark.parametrize("mesh", first_of([*MESHES]))
def test_ranks_that_split_layers_train_like_one_process(mesh: str) -> None:
    """Queries, keys and values stand side by side in one layer, in groups of unequal size."""
    check_like_one_process(MESHES[mesh], MANY)


def test_in_fp32_and_under_autocast_the_losses_stay() -> None:
    choices: list[Choices] = [{"precision": "fp32"}, {"precision": "bf16"}]
    wanted = train_each(GROUPED, choices, THREE)
    split = [{**each, "sharding": "tensor"} for each in choices]
    for found in on_ranks(train_each, GROUPED, split, THREE):
        for one, other, band in zip(found, wanted, (1e-5, 2e-3), strict=True):
            assert errors(one, other)["losses"] < band


@pytest.mark.slow
@pytest.mark.parametrize(("knob", "num_ranks"), [(TensorParallel(), 2), (ZeRO1(tensor=2), 4)])
def test_states_of_few_bits_have_the_same_losses(knob: Knob, num_ranks: int) -> None:
    wanted = train(GROUPED, knobs_of(optimizer="adamw_8bit"), THREE)
    knobs = knobs_of(optimizer="adamw_8bit", sharding=knob)
    for found in on_ranks(train, GROUPED, knobs, THREE, num_ranks=num_ranks):
        assert errors(found, wanted)["losses"] < 1e-4


def held(knob: Knob) -> tuple[int, int, int]:
    """The numbers of the weights of a block's layers, of those that this rank has, and of all that it has."""
    rig = assemble(GROUPED, knobs_of(sharding=knob), CPU)
    matrices = [each for block in rig.structure.blocks for each in block.parameters() if each.dim() > 1]
    everything = sum(local(each).numel() for each in rig.model.parameters())
    return sum(each.numel() for each in matrices), sum(local(each).numel() for each in matrices), everything


def test_a_rank_holds_its_share_of_a_block() -> None:
    for whole_numel, own_numel, _ in on_ranks(held, TensorParallel()):
        assert own_numel * 2 == whole_numel


@pytest.mark.slow
def test_sharded_rows_hold_a_share_of_a_share() -> None:
    for whole_numel, own_numel, _ in on_ranks(held, FSDP(tensor=2), num_ranks=4):
        assert own_numel * 4 == whole_numel


class Remembering(Mlp):
    """Changes what it holds in each forward pass, on each rank by its own samples."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.mean += x.detach().mean()
        return super().forward(x)


def buffers_of_rows() -> list[float]:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(7))
    model = lowvram.task(Net(Remembering, 1), x, blocks="Remembering")
    rig = lowvram.assemble(model, f"sharding=tensor sharding.tensor=2 {NAMED}", "cpu")
    mine = slice(4 * data_ranks().rank, 4 * data_ranks().rank + 4)
    lowvram.step(rig, lowvram.Part(x[mine], torch.zeros(4, dtype=torch.long)))
    return [float(each) for each in rig.model.buffers()]


@pytest.mark.slow
def test_rows_agree_on_what_forward_passes_change() -> None:
    """Ranks that are in no row of all others make groups of their own."""
    first, *others = on_ranks(buffers_of_rows, num_ranks=4)
    assert first != [0.0]
    assert others == [first] * 3


def test_it_saves_weights_gradients_and_states() -> None:
    alone, _ = measured({})
    for peak, _ in on_ranks(measured, {"sharding": "tensor"}):
        for kind in (Kind.PARAMETERS, Kind.GRADIENTS, Kind.OPTIMIZER):
            assert peak.by_kind_max[kind] < 0.6 * alone.by_kind_max[kind]
        assert peak.by_kind_max[Kind.ACTIVATIONS] < alone.by_kind_max[Kind.ACTIVATIONS]


def state_and_order() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The whole state of a model, and what this rank computes from one sequence."""
    rig = assemble(InDouble(GROUPED), knobs_of(sharding="tensor"), CPU)
    state = {name: whole(value) for name, value in rig.model.state_dict().items()}
    return state, {"": rig.model(torch.arange(8)[None]).detach()}


def test_names_values_and_layout_are_those_of_one_process() -> None:
    rig = assemble(InDouble(GROUPED), knobs_of(), CPU)
    for state, outputs in on_ranks(state_and_order):
        assert relative_error(state, dict(rig.model.state_dict())) == 0
        assert relative_error(outputs, {"": rig.model(torch.arange(8)[None])}) < 1e-12


# Numbers and options that don't fit


def refusals(knob: Knob, more: Choices) -> str:
    with pytest.raises((BadInput, Incompatible)) as refused:
        assemble(GROUPED, knobs_of(sharding=knob, **more), CPU)
    return str(refused.value)


def test_numbers_that_do_not_divide_are_refused_with_those_that_do() -> None:
    assert (
        on_ranks(refusals, TensorParallel(), {}, num_ranks=4)
        == ["sharding.tensor=4: must be a number that divides the model's 2 heads of keys and values: one of 1, 2"] * 4
    )
    with pytest.raises(BadInput, match=r"sharding\.tensor=3: must be a number that divides the 4 ranks"):
        TensorParallel(tensor=3).row_shape(4)
    with pytest.raises(BadInput, match=r"sharding\.tensor=0: must be null, or at least 1"):
        TensorParallel(tensor=0)
    with pytest.raises(BadInput, match=r"sharding\.tensor=2: must be 1 with sharding\.replicate above 1"):
        FSDP(tensor=2, replicate=2)
    with pytest.raises(BadInput, match=r"sharding\.tensor=null: must be 1, or the ranks of a row"):
        FSDP(tensor=None)
    with pytest.raises(BadInput, match=r"sharding\.tensor=null: must be 1, or the ranks of a row"):
        ZeRO1(tensor=None)


def test_without_compiled() -> None:
    """Compiled code would have to be made for tensors that lie on several ranks."""
    knobs = named(("sharding", "tensor"), ("compile", "model"))
    assert any("runs eagerly" in reason for reason in conflicts(knobs, {Fact.ONE_RANK: ""}))


def test_without_plain_products() -> None:
    """An adapter has layers of its own, which nobody splits."""
    why = "; ".join(conflicts(named(("sharding", "tensor"), ("adapter", "lora")), {Fact.ONE_RANK: ""}))
    assert "adapter" in why
    assert "layers multiply by their weights as they are" in why


def test_a_loop_of_ones_own_must_give_a_row_the_same_samples() -> None:
    assert all("were given different samples" in said for said in on_ranks(of_different_samples))


def of_different_samples() -> str:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(torch.distributed.get_rank()))
    rig = lowvram.assemble(lowvram.task(Net(Mlp), x, blocks="Mlp"), f"sharding=tensor {NAMED}", "cpu")
    with pytest.raises(Incompatible) as refused:
        lowvram.step(rig, lowvram.Part(x, torch.zeros(4, dtype=torch.long)))
    return str(refused.value)


# Other people's models

NAMED = "sharding.splits={*.a:columns,*.b:rows}"


def trained(options: str) -> dict[str, Tensor]:
    torch.manual_seed(1128)
    model, x, targets = Net(Mlp).double(), torch.randn(8, WIDTH).double(), torch.randint(5, (8,))
    rig = lowvram.assemble(lowvram.task(model, x, blocks="Mlp"), f"optimizer=sgd optimizer.lr=0.3 {options}", "cpu")
    mine = slice(8 * data_ranks().rank // data_ranks().size, 8 * (data_ranks().rank + 1) // data_ranks().size)
    for _ in range(3):
        lowvram.step(rig, lowvram.Part(x[mine], targets[mine]))
    return {name: whole(value).clone() for name, value in rig.model.state_dict().items()}


def test_layers_that_the_user_names() -> None:
    wanted = trained("")
    for found in on_ranks(trained, f"sharding=tensor {NAMED}"):
        assert relative_error(found, wanted) < 1e-12


class Mixing(nn.Module):
    """Reads all features at once between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.fc1(x).softmax(-1))


class Scaling(Mixing):
    """Knows by heart how many features there are."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.fc1(x).tanh() / self.fc2.weight.shape[1] ** 0.5)


class Usual(Mixing):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.fc1(x).tanh())


def known_of(block: type[nn.Module]) -> Structure:
    return structure_of(lowvram.task(Net(block), torch.randn(4, WIDTH), blocks=block.__name__))


def test_a_model_that_would_compute_something_else_is_refused() -> None:
    """Silently: the shapes fit."""
    usual = known_of(Usual).get(FindSplits(2))
    assert usual.layers["blocks.0.fc1"] == Split(How.columns)
    assert usual.layers["blocks.3.fc2"] == Split(How.rows)
    with pytest.raises(Incompatible, match=re.escape("blocks.0 doesn't compute the same where its layers are split")):
        known_of(Mixing).get(FindSplits(2))
    with pytest.raises(Incompatible, match="it isn't known how this model's layers are split"):
        known_of(Mlp).get(FindSplits(2))
    with pytest.raises(BadInput, match=re.escape("*.c is none's")):
        known_of(Mlp).get(FindSplits(2, (("*.c", How.columns),)))
    assert known_of(Mlp).get(FindSplits(2, (("*.a", How.columns), ("*.b", How.rows)))).counts == ()
    with pytest.raises(Incompatible, match="stem doesn't compute the same"):
        known_of(Mlp).get(FindSplits(2, (("stem", How.columns),)))


def test_a_trial_sees_every_kind_of_mistake() -> None:
    known = known_of(Usual)
    pair = {"blocks.0.fc1": Split(How.columns), "blocks.0.fc2": Split(How.rows)}
    assert trouble_with(known, Splits(pair), 2) is None
    for wrong in (
        {"blocks.0.fc1": Split(How.columns)},
        {"blocks.0.fc1": Split(How.rows), "blocks.0.fc2": Split(How.columns)},
        {**pair, "blocks.0.fc1": Split(How.columns, (4, 4))},
    ):
        assert trouble_with(known, Splits(wrong), 2) == "blocks.0"


FAMILIES = ["gpt2", "llama:grouped", "qwen3:grouped", "gemma:grouped", "gpt_neox", "opt"]
ENCODERS = ["bert:masked", "roberta:masked", "distilbert:masked"]
REFUSED = ["phi3:fused", "mixtral:experts"]


def known_of_family(kind: str) -> Structure:
    modality = Modality.MASKED_TOKENS if kind in ENCODERS else Modality.TOKENS
    return structure_of(Auto().pose(HfConfig(name=tiny(kind)), DataSpec(modality, 300, (8,), 300)))


@pytest.mark.parametrize("kind", first_of([*FAMILIES, *ENCODERS]))
def test_the_layers_of_transformers_classes_are_found(kind: str) -> None:
    known = known_of_family(kind)
    ways = [each.how for each in known.get(FindSplits(2)).layers.values()]
    num_blocks = len(known.blocks)
    assert ways.count(How.rows) == 2 * num_blocks
    assert ways.count(How.columns) in (2 * num_blocks, 4 * num_blocks, 5 * num_blocks)


@pytest.mark.parametrize(
    ("knob", "num_ranks"), first_of([(TensorParallel(), 2), (FSDP(tensor=2), 4), (ZeRO1(tensor=2), 4)])
)
def test_moments_of_neurons_are_those_of_whole_layers(knob: Knob, num_ranks: int) -> None:
    """Adam-mini has one for each output of a layer: of GPT-2's weights for each column."""
    gpt2 = Auto().pose(HfConfig(name=tiny("gpt2"), dropout=0.0), DataSpec(Modality.TOKENS, 300, (8,), 300))
    for task in (InDouble(gpt2), InDouble(GROUPED)):
        wanted = train(task, knobs_of(optimizer="adam_mini"), [8, 8])
        for found in on_ranks(train, task, knobs_of(optimizer="adam_mini", sharding=knob), [8, 8], num_ranks=num_ranks):
            assert max(errors(found, wanted)[what] for what in ("losses", "gradients", "parameters")) < 1e-10


@pytest.mark.parametrize(
    ("knob", "num_ranks"), first_of([(TensorParallel(), 2), (FSDP(tensor=2), 4), (ZeRO1(tensor=2), 4)])
)
def test_norms_that_see_some_features_get_the_gradients_of_all(knob: Knob, num_ranks: int) -> None:
    """Those of queries and keys: also where FSDP2 has put other parameters into their places."""
    spec = DataSpec(Modality.TOKENS, 300, (8,), 300)
    task = InDouble(Auto().pose(HfConfig(name=tiny("qwen3:grouped")), spec))
    wanted = train(task, knobs_of(optimizer="sgd"), [8, 8])
    for found in on_ranks(train, task, knobs_of(optimizer="sgd", sharding=knob), [8, 8], num_ranks=num_ranks):
        assert max(errors(found, wanted)[what] for what in ("losses", "gradients", "parameters")) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("kind", REFUSED)
def test_layers_that_do_not_split_are_refused(kind: str) -> None:
    with pytest.raises(Incompatible, match="doesn't compute the same where its layers are split over 2 ranks"):
        known_of_family(kind).get(FindSplits(2))


def test_a_row_of_more_ranks_than_heads_is_told_how_many_there_are() -> None:
    with pytest.raises(BadInput, match=r"sharding\.tensor=4: .* the model's 2 heads of keys and values: one of 1, 2"):
        known_of_family("qwen3:grouped").get(FindSplits(4))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "qwen3:grouped", "bert:masked"])
def test_a_class_of_transformers_trains_as_on_one_process(call: Callable[..., Outcome], kind: str) -> None:
    """Its weights are random ones, drawn once."""
    words = ["model=hf", f"model.name={with_weights(kind)}", "train.batch_size=4", "train.steps=3"]
    data = ["data=synthetic", "data.sequence_length=16", "data.eval_samples=8", "logger=none"]
    rows = [
        call(*words, *data, *more, f"hydra.run.dir={name}").row
        for name, more in {"alone": [], "split": ["sharding=tensor", "sharding.ranks=2"]}.items()
    ]
    losses = [[row["loss"][name] for name in ("first", "last", "eval")] for row in rows]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_layers_that_stand_side_by_side_are_each_split() -> None:
    order = packed_order((4, 2, 2), 2)
    assert order is not None
    assert order.tolist() == [0, 1, 4, 6, 2, 3, 5, 7]
    assert packed_order((), 2) is None


def test_rows_share_out_the_batch() -> None:
    assert TensorParallel(tensor=2).row_shape(6).tensor == 2
    assert TensorParallel().row_shape(6).tensor == 6
    assert DDP().row_shape(6).tensor == 1
