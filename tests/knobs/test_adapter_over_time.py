"""adapter=progressive, lisa and badam: what trains in which step, and how a run goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn

import lowvram
from lowvram.compat.torch_modules import BatchNorm
from lowvram.config.errors import BadInput, Incompatible
from lowvram.core.assemble import assemble
from lowvram.core.knob import Knob
from lowvram.core.rig import Rig
from lowvram.core.states import load_whole, trained_state
from lowvram.core.step import step
from lowvram.core.stepper import StepperAround
from lowvram.knobs.adapter import BAdam, Lisa, Order, Progressive
from lowvram.knobs.adapter.over_time import OverTime
from lowvram.knobs.adapter.units import Units
from lowvram.knobs.optimizer import SGD
from lowvram.knobs.optimizer.external import External
from lowvram.knobs.stepping import CpuOffload, CpuOffloadStepper, InBackward, SumsIn
from lowvram.loops.fields import about_model
from lowvram.models.transformer import TransformerConfig
from lowvram.tasks import Auto, Problem
from tests.laboratory import (
    CPU,
    IMAGES,
    PROBLEMS,
    TOKENS,
    Trained,
    knobs_of,
    leaves_something_behind,
    make_batch,
    relative_error,
    train,
)
from tests.ranks import on_ranks
from tests.tiers import first_of

pytestmark = [pytest.mark.medium, pytest.mark.sampled(2)]

EACH_STEP = [Progressive(every=1), Lisa(blocks=1, every=1), BAdam(every=1)]  # other blocks in each step
STEPPING: dict[str, dict[str, str | Knob]] = {
    "after_backward": {},
    "in_backward": {"stepping": InBackward(clip=0.5), "accum": "x2"},
    "sums": {"stepping": InBackward(sums=SumsIn.int8), "accum": "x4"},
    "cpu_offload": {"stepping": "cpu_offload", "ckpt": "every1", "precision": "bf16_pure"},
    "zeroth_order": {"stepping": "zeroth_order"},
    "fp16": {"precision": "fp16", "optimizer": "muon", "logits": "chunked"},
}


def rig_of(problem: str, **choices: str | Knob) -> Rig:
    return assemble(PROBLEMS[problem], knobs_of(**choices), CPU)


def equal(one: Trained, other: Trained) -> bool:
    both = [(one.gradients, other.gradients), (one.parameters, other.parameters), (one.buffers, other.buffers)]
    return one.losses == other.losses and all(relative_error(*pair) == 0 for pair in both if pair[1])


# What trains


def changed(rig: Rig, steps: int) -> list[set[str]]:
    """For each of some steps, the parts of the model whose parameters change."""
    found = []
    for seed in range(steps):
        before = {name: parameter.clone() for name, parameter in rig.model.named_parameters()}
        assert step(rig, make_batch(rig.task.spec, 8, seed))[1].applied  # pyright: ignore[reportAttributeAccessIssue]
        names = (name for name, parameter in rig.model.named_parameters() if not parameter.equal(before[name]))
        found.append({".".join(name.split(".")[:2]) if "blocks" in name else name.split(".")[0] for name in names})
    return found


BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


@pytest.mark.parametrize(
    ("problem", "adapter", "wanted"),
    [
        ("transformer", BAdam(every=1, order=Order.ascending), [*map(set, zip(BLOCKS)), {"token_embedding", "norm"}]),
        ("resnet", BAdam(every=1, order=Order.descending), [{"stem", "head"}, {BLOCKS[2]}, {BLOCKS[1]}, {BLOCKS[0]}]),
        ("resnet", BAdam(2, every=1, order=Order.ascending, ends=False), [{*BLOCKS[:2]}, {BLOCKS[2]}, {*BLOCKS[:2]}]),
        (
            "resnet",
            Progressive(every=1),
            [{"stem", *BLOCKS, "head"}, {*BLOCKS, "head"}, {*BLOCKS[1:], "head"}, *2 * [{BLOCKS[2], "head"}]],
        ),
        (
            "transformer",  # the head shares the embedding's weight, which is frozen with it
            Progressive(every=2, frozen=1, most=2),
            [*2 * [{*BLOCKS, "norm"}], *3 * [{*BLOCKS[1:], "norm"}]],
        ),
    ],
)
def test_only_the_blocks_whose_turn_it_is_change(problem: str, adapter: Knob, wanted: list[set[str]]) -> None:
    assert changed(rig_of(problem, adapter=adapter), len(wanted)) == wanted


def test_lisa_trains_the_ends_and_other_blocks_from_period_to_period() -> None:
    found = changed(rig_of("resnet", adapter=Lisa(blocks=1, every=2)), 12)
    assert all(len(each) == 3 and {"stem", "head"} < each for each in found)
    assert all(one == other for one, other in zip(found[::2], found[1::2], strict=True))
    assert len(set(map(frozenset, found))) > 1


@pytest.mark.sampled
@pytest.mark.parametrize("problem", ["transformer_dropout", "resnet"])
@pytest.mark.parametrize("stepping", STEPPING)
@pytest.mark.parametrize("adapter", [Lisa(blocks=9, every=1), BAdam(blocks=9, every=1), Progressive(every=9)])
def test_with_all_blocks_it_is_the_plain_run_to_the_bit(adapter: Knob, stepping: str, problem: str) -> None:
    task, others = PROBLEMS[problem], STEPPING[stepping]
    if "dropout" in problem and "accum" in others:
        task = PROBLEMS["transformer"]  # parts draw other masks
    assert equal(train(task, knobs_of(**others, adapter=adapter), [8] * 3), train(task, knobs_of(**others), [8] * 3))


@pytest.mark.parametrize("problem", ["transformer", "resnet_group"])
@pytest.mark.parametrize("adapter", EACH_STEP)
def test_what_trains_has_the_gradients_that_it_has_when_all_train(adapter: Knob, problem: str) -> None:
    some = train(PROBLEMS[problem], knobs_of(adapter=adapter), [8]).gradients
    whole = train(PROBLEMS[problem], knobs_of(), [8]).gradients
    assert 0 < len(some) <= len(whole)
    assert relative_error(some, {name: whole[name] for name in some}) == 0


# Choices are a pure function of seed and step


def test_each_draw_of_lisa_is_a_function_of_seed_and_period() -> None:
    adapter = Lisa(blocks=2, every=5)
    draws = [adapter.active(step, 4, seed=0) for step in range(3000)]
    assert draws == [adapter.active(step, 4, seed=0) for step in range(3000)]
    assert draws != [adapter.active(step, 4, seed=1) for step in range(3000)]
    assert all(len(set(draws[first : first + 5])) == 1 for first in range(0, 3000, 5))
    counts = Counter(draws[::5])
    assert set(counts) == {frozenset({0, *two, 5}) for two in combinations(range(1, 5), 2)}
    assert all(abs(count - 100) < 40 for count in counts.values())  # four standard deviations


@pytest.mark.parametrize("order", Order)
def test_each_block_has_one_turn_in_a_round(order: Order) -> None:
    adapter = BAdam(blocks=2, every=3, order=order)
    rounds = [[adapter.active(step, 4, seed=0) for step in range(start, start + 9, 3)] for start in (0, 9, 18)]
    for turns in rounds:
        assert sorted(unit for turn in turns for unit in turn) == [0, 1, 2, 3, 4, 5]
        assert [len(turn - {0}) for turn in turns] == [2, 2, 1]
    assert (rounds[0] == rounds[1] == rounds[2]) is (order is not Order.random)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Lisa(blocks=0), r"adapter\.blocks=0: must be at least 1"),
        (lambda: BAdam(every=0), r"adapter\.every=0: must be at least 1 step"),
        (lambda: Progressive(every=0), r"adapter\.every=0"),
        (lambda: Progressive(frozen=-1), r"adapter\.frozen=-1"),
        (lambda: Progressive(frozen=3, most=2), r"adapter\.most=2: must be null .* adapter\.frozen=3"),
    ],
)
def test_a_number_out_of_range_is_refused(make: type, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        make()


# Units


class Late(nn.Module):
    """Names its head first, has a norm between its blocks, and shares a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.first, self.between, self.second = nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.head = nn.Linear(3, 5)


def test_what_is_outside_the_blocks_belongs_to_what_follows_it() -> None:
    model = Late()
    units = Units(model, [model.first, model.second])
    named = {parameter: name for name, parameter in model.named_parameters()}
    assert [[named[parameter] for parameter in unit] for unit in units.parameters] == [
        ["embedding.weight"],
        ["first.weight", "first.bias"],
        ["between.weight", "between.bias", "second.bias"],
        ["head.weight", "head.bias"],
    ]
    assert units.sizes == [15, 12, 9, 20]


class AllBlocks(nn.Module):
    """Nothing is outside the blocks, the second has no parameters, and the third is left out every second time."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Part(), Part(False), Part()])
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.blocks[1](self.blocks[0](x))
        return self.blocks[2](x) if self.calls % 2 else x


class Part(nn.Module):
    def __init__(self, has_layer: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4) if has_layer else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


@pytest.mark.parametrize("stepping", ["after_backward", "in_backward accum=x2", "cpu_offload"])
@pytest.mark.parametrize("adapter", ["badam adapter.every=1", "lisa adapter.every=1", "progressive"])
def test_a_turn_without_parameters_is_the_next_one_s(adapter: str, stepping: str) -> None:
    x, targets = torch.randn(3, 4), torch.zeros(3, 4)
    model = AllBlocks()
    task = lowvram.task(model, x, lambda outputs, targets: (outputs - targets).square().sum(), blocks="Part")
    rig = lowvram.assemble(task, f"adapter={adapter} stepping={stepping}", "cpu")
    first = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(12):
        assert lowvram.step(rig, lowvram.Part(x, targets))[0].isfinite()
    assert not any(map(torch.equal, first, model.parameters()))


def test_a_loss_that_never_depends_on_what_trains_is_refused() -> None:
    x, targets = torch.randn(3, 4), torch.zeros(3, 4)
    task = lowvram.task(AllBlocks(), x, lambda outputs, targets: (outputs.detach() - targets).square().sum(), "Part")
    rig = lowvram.assemble(task, "adapter=badam", "cpu")
    for _ in range(10):
        lowvram.step(rig, lowvram.Part(x, targets))
    with pytest.raises(Incompatible, match=r"^adapter=badam needs that weights that train take part in the loss"):
        lowvram.step(rig, lowvram.Part(x, targets))


def test_batch_norm_of_blocks_that_rest_keeps_its_statistics() -> None:
    rig = rig_of("resnet", adapter=BAdam(every=1, order=Order.ascending))
    for index in range(8):
        if index == 5:
            rig.model.eval()
            rig.model.train()  # as an evaluation does
        before = {name: buffer.clone() for name, buffer in rig.model.named_buffers()}
        step(rig, make_batch(IMAGES, 8, index))
        moved = {name for name, buffer in rig.model.named_buffers() if not buffer.equal(before[name])}
        trained = {"stem."} if index % 4 == 3 else {f"blocks.{index % 4}."}
        norms = {name for name, module in rig.model.named_modules() if isinstance(module, BatchNorm)}
        own = {name for name in norms if any(name.startswith(each) for each in trained)}
        assert {name.rpartition(".")[0] for name in moved} == own
        assert len(moved) == 3 * len(own) > 0


def test_the_row_says_what_rests() -> None:
    def caveat(adapter: OverTime, problem: str) -> str:
        rig = rig_of(problem, adapter=adapter)
        step(rig, make_batch(PROBLEMS[problem].spec, 4))
        about = about_model(rig.task, rig.model, [adapter])
        assert about["model"]["trainable"] == about["model"]["parameters"]
        return about["semantics_changed"]

    assert caveat(Lisa(), "transformer") == "only 2 blocks train at a time, drawn anew every 20 steps"
    assert caveat(BAdam(ends=False), "resnet_group") == (
        "only 1 block trains at a time, for 20 steps, and what is outside the blocks never does"
    )
    assert caveat(Progressive(), "resnet") == (
        "the model freezes from the bottom up, one block more every 100 steps; "
        "meanwhile their BatchNorm layers normalise by their running statistics"
    )


# Going on


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("problem", "stepping"),
    first_of([(one, stepping) for stepping in STEPPING for one in ("transformer", "resnet")], 4),
)
@pytest.mark.parametrize("adapter", [Lisa(1, every=3), BAdam(every=3), Progressive(every=3)])
@pytest.mark.parametrize("saved_after", [3, 4])  # at a switch, and in the middle of a period
def test_a_run_goes_on_as_if_it_had_not_been_interrupted(
    adapter: Knob, stepping: str, problem: str, saved_after: int
) -> None:
    def rig() -> Rig:
        return rig_of(problem, adapter=adapter, **STEPPING[stepping])

    def go(rig: Rig, steps: Iterable[int]) -> list[torch.Tensor]:
        return [step(rig, make_batch(PROBLEMS[problem].spec, 8, seed))[0] for seed in steps]

    whole, first, second = rig(), rig(), rig()
    wanted = go(whole, range(9))
    go(first, range(saved_after))
    saved, state = trained_state(first.model), first.stepper.state_dict()
    assert saved.keys() == first.model.state_dict().keys()  # what rests was trained, too
    load_whole(second.model, saved)
    second.stepper.load_state_dict(state)
    assert go(second, range(saved_after, 9)) == wanted[saved_after:]
    assert relative_error(dict(second.model.named_parameters()), dict(whole.model.named_parameters())) == 0


def test_masters_on_the_host_outlive_a_rest() -> None:
    """Weights in bf16 have lost what they keep."""
    adapter = BAdam(every=1, order=Order.ascending)
    rig = rig_of("transformer", adapter=adapter, stepping=CpuOffload(), precision="bf16_pure", optimizer="sgd")
    step(rig, make_batch(TOKENS, 8))
    around = rig.stepper
    assert isinstance(around, StepperAround)
    inner = around.inner
    assert isinstance(inner, CpuOffloadStepper)
    weight = dict(rig.model.named_parameters())["blocks.0.mlp.up.weight"]
    master = inner.masters[weight].clone()
    assert not master.equal(weight.float())
    step(rig, make_batch(TOKENS, 8, 1))
    assert inner.masters[weight].equal(master)


# With other options


@pytest.mark.parametrize("nesterov", [False, True])
def test_momenta_begin_beside_others_that_go_on(nesterov: bool) -> None:
    """As with torch's SGD that isn't fused, which knows parameters without a momentum."""
    adapter, fused = Lisa(blocks=1, every=1), SGD(lr=0.1, nesterov=nesterov)
    plain = External("torch.optim.SGD", 0.1, {"momentum": 0.9, "nesterov": nesterov})
    one, other = (
        train(PROBLEMS["transformer"], knobs_of(adapter=adapter, optimizer=optimizer), [8] * 5)
        for optimizer in (fused, plain)
    )
    assert relative_error(one.parameters, other.parameters) < 1e-6


@pytest.mark.parametrize("problem", ["transformer", "resnet"])
@pytest.mark.parametrize("adapter", EACH_STEP)
def test_weights_on_the_host_train_in_turns_to_the_bit(adapter: Knob, problem: str) -> None:
    one, other = (
        train(PROBLEMS[problem], knobs_of(adapter=adapter, offload=offload), [8] * 5)
        for offload in ("parameters", "none")
    )
    assert equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize(("adapter", "problem"), [(EACH_STEP[1], "transformer"), (EACH_STEP[2], "resnet_group")])
def test_several_ranks_train_the_same_blocks(adapter: Knob, problem: str) -> None:
    choices = [knobs_of(adapter=adapter, sharding=sharding, optimizer="sgd") for sharding in ("ddp", "fsdp")]
    wanted = train(PROBLEMS[problem], knobs_of(adapter=adapter, optimizer="sgd"), [8] * 3)
    for found in on_ranks(train_all, PROBLEMS[problem], choices):
        for each in found:
            assert relative_error(each.gradients, wanted.gradients) < 1e-5
            assert relative_error(each.parameters, wanted.parameters) < 1e-5


def train_all(task: Problem, choices: list[dict[str, Knob]]) -> list[Trained]:
    return [train(task, knobs, [8] * 3) for knobs in choices]


@pytest.mark.parametrize("problem", ["transformer", "resnet"])
def test_torchscript_follows(problem: str) -> None:
    one, other = (
        train(PROBLEMS[problem], knobs_of(adapter=BAdam(every=1, order=Order.ascending), compile=name), [8] * 5)
        for name in ("torchscript", "none")
    )
    assert equal(one, other)


@pytest.mark.slow
def test_without_same_params() -> None:
    """A whole model would be compiled for each choice of what trains; blocks need a few graphs for all choices."""

    def num_graphs(compiled: Iterable[nn.Module], rig: Rig, steps: int) -> int:
        graphs = list[object]()

        def count(graph: torch.fx.GraphModule, _: object) -> object:
            graphs.append(graph)
            return graph

        torch.compiler.reset()
        for module in compiled:
            module.compile(backend=count)
        changed(rig, steps)
        return len(graphs)

    adapter = BAdam(every=1, order=Order.descending)
    task = Auto().pose(TransformerConfig(num_layers=4, width=16, num_heads=2, context=8), TOKENS)
    whole, blocks = (assemble(task, knobs_of(adapter=adapter), CPU) for _ in range(2))
    assert num_graphs([whole.model], whole, 5) == 5
    assert num_graphs(task.structure(blocks.model).blocks, blocks, 5) <= 3
    with pytest.raises(Incompatible, match="compile=model needs that the same parameters train in every step"):
        rig_of("transformer", adapter=adapter, compile="model")


def test_without_undoable_steps() -> None:
    """The next step trains other blocks, also after an update that was left out."""
    assert leaves_something_behind(adapter="badam")
    assert leaves_something_behind(adapter="lisa")
