"""depth=layer_drop and depth=stochastic: what each step computes, and that parts, ranks and resumption don't matter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from lowvram.compress.sparsity import Magnitude
from lowvram.config.errors import BadInput, Incompatible
from lowvram.core.assemble import assemble
from lowvram.core.heaviest import fix_heaviest
from lowvram.core.knob import Knob
from lowvram.core.ledger import ledger
from lowvram.core.mesh import Ranks
from lowvram.core.probes.stated import BRANCHES
from lowvram.core.rig import Part, Rig
from lowvram.core.states import load_whole, trained_state
from lowvram.core.step import step
from lowvram.core.structure import Blocks
from lowvram.knobs.accum import Parts
from lowvram.knobs.adapter import BAdam
from lowvram.knobs.compile import Traced
from lowvram.knobs.depth import LayerDrop, StochasticDepth
from lowvram.knobs.depth.same_shape import SameShape
from lowvram.knobs.depth.stochastic import Added, Branch, Draws
from lowvram.knobs.tile.blocks import Tiled
from lowvram.models.hf import HfConfig
from lowvram.models.resnet import BlockKind, NormKind
from lowvram.tasks import Auto, Problem
from tests.hugging import tiny
from tests.laboratory import (
    CPU,
    FIVE_BLOCKS,
    IMAGES,
    PROBLEMS,
    RESNET,
    TOKENS,
    Trained,
    knobs_of,
    leaves_something_behind,
    make_batch,
    my_slice,
    peak_as_planned,
    relative_error,
    saved_bytes,
    train,
)
from tests.ranks import on_ranks
from tests.tiers import first_of

DROP, STOCHASTIC = LayerDrop(), StochasticDepth(0.6)
HUGGING = Auto().pose(HfConfig(name=tiny("llama")), replace(TOKENS, num_classes=300))


def rig_of(problem: str | Problem, **choices: str | Knob) -> Rig:
    return assemble(PROBLEMS[problem] if isinstance(problem, str) else problem, knobs_of(**choices), CPU)


def equal(one: Trained, other: Trained) -> bool:
    both = [(one.gradients, other.gradients), (one.parameters, other.parameters), (one.buffers, other.buffers)]
    return one.losses == other.losses and all(relative_error(*pair) == 0 for pair in both if pair[1])


# depth=layer_drop: what a step computes


def numbers_skipped(rig: Rig) -> frozenset[int]:
    """In the present step."""
    gates = [vars(block)["forward"] for block in rig.structure.modules(rig.structure.get(SameShape()))]
    return frozenset(number for number, gate in enumerate(gates) if gate.is_skipped)


def test_each_draw_is_a_function_of_seed_and_step() -> None:
    knob = LayerDrop(2)
    draws = [knob.drawn(step, 4, seed=0) for step in range(600)]
    assert draws == [knob.drawn(step, 4, seed=0) for step in range(600)]
    assert draws != [knob.drawn(step, 4, seed=1) for step in range(600)]
    counts = Counter(draws)
    assert set(counts) == {frozenset(two) for two in combinations(range(4), 2)}
    assert all(abs(count - 100) < 40 for count in counts.values())  # four standard deviations


@pytest.mark.parametrize("problem", [FIVE_BLOCKS["transformer"], FIVE_BLOCKS["resnet"], HUGGING])
def test_a_step_computes_the_model_without_the_blocks_that_it_skips(problem: Problem) -> None:
    rig, plain = (rig_of(problem, depth=depth, optimizer="sgd") for depth in (LayerDrop(1), "none"))
    batch = make_batch(problem.spec, 6)
    loss, _ = step(rig, batch)
    (skipped,) = numbers_skipped(rig)
    block = problem.structure(plain.model).blocks[skipped]
    block.forward = lambda x, **_: x
    assert loss == step(plain, batch)[0]


@pytest.mark.parametrize("problem", ["transformer", "resnet"])
def test_weights_of_skipped_blocks_get_the_gradient_zero(problem: str) -> None:
    found = train(PROBLEMS[problem], knobs_of(depth=DROP), [8])
    skipped = f"blocks.{min(DROP.drawn(0, len(same_shape(problem)), seed=0))}."
    zero = {name for name, gradient in found.gradients.items() if not gradient.any()}
    in_block = {name for name in found.gradients if name.startswith(skipped)}
    assert in_block
    assert in_block == {name for name in zero if name.startswith("blocks.")}
    assert found.gradients.keys() == train(PROBLEMS[problem], knobs_of(), [8]).gradients.keys()


def same_shape(problem: str) -> Mapping[str, int]:
    return PROBLEMS[problem].structure(PROBLEMS[problem].make_model()).get(SameShape())


def test_blocks_that_change_the_shape_are_never_skipped() -> None:
    """The first of each stage of a ResNet, but with basic blocks that of the first stage."""
    for block, wanted in ((BlockKind.basic, [0, 1, 3]), (BlockKind.bottleneck, [1, 3])):
        task = Auto().pose(replace(RESNET, layers=[2, 2], block=block), IMAGES)
        known = task.structure(task.make_model())
        assert [known.get(Blocks()).blocks.index(name) for name in known.get(SameShape())] == wanted


def test_evaluations_skip_nothing() -> None:
    for knob in (DROP, STOCHASTIC):
        for problem in ("transformer", "resnet"):
            rig, plain = (rig_of(problem, depth=depth, optimizer="sgd") for depth in (knob, "none"))
            batch = make_batch(PROBLEMS[problem].spec, 6)
            step(rig, batch)
            load_whole(plain.model, trained_state(rig.model))
            with torch.no_grad():
                found, wanted = (each.forward(batch) for each in (evaluating(rig), evaluating(plain)))
            assert found.equal(wanted)


def evaluating(rig: Rig) -> Rig:
    rig.model.eval()
    return rig


@pytest.mark.parametrize("problem", FIVE_BLOCKS)
def test_so_many_blocks_less_are_kept(problem: str) -> None:
    """Each block keeps as much as another."""
    task = FIVE_BLOCKS[problem]
    batch = make_batch(task.spec, 8)
    whole, *others = (saved_bytes(task, knobs_of(depth=depth), batch) for depth in ("none", *map(LayerDrop, (1, 3))))
    of_a_block = whole - others[0]
    assert of_a_block > whole / 10
    assert others[1] == whole - 3 * of_a_block


# depth=stochastic: what a step computes


@pytest.mark.parametrize("problem", ["transformer", "resnet", "resnet_group"])
def test_at_rate_0_it_is_the_plain_run_to_the_bit(problem: str) -> None:
    found, wanted = (
        train(PROBLEMS[problem], knobs_of(depth=depth), [8] * 3) for depth in (StochasticDepth(0.0), "none")
    )
    assert equal(found, wanted)


@pytest.mark.parametrize("problem", [FIVE_BLOCKS["transformer"], FIVE_BLOCKS["resnet"], HUGGING])
def test_a_sample_leaves_out_what_a_block_adds(problem: Problem) -> None:
    """Here in the last block, whose rate is the highest."""
    rig = rig_of(problem, depth=StochasticDepth(0.6))
    seen = list[Any]()
    rig.structure.blocks[-1].register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output)))
    step(rig, make_batch(problem.spec, 64))
    ((x, y),) = seen
    left_out = sum(torch.equal(before, after) for before, after in zip(x, y, strict=True))
    assert 9 < left_out < 38 + 16  # of two branches both: 0.36 of the samples


@pytest.mark.parametrize("problem", [FIVE_BLOCKS["transformer"], FIVE_BLOCKS["resnet"], HUGGING])
def test_what_is_added_is_scaled(problem: Problem) -> None:
    """To what a branch, or the block of another model, adds without draws, times 0 or 1 / (1 - rate)."""
    rate = 0.6
    rig, seen = rig_of(problem, depth=StochasticDepth(rate)), list[Any]()
    known = problem.structure(rig.model)
    branches = known.get(BRANCHES)
    module = known.modules(branches[-1])[0] if branches else problem.structure(rig.model).blocks[-1]
    branch: Branch = vars(module)["forward"]
    plain = branch.call

    def noting(x: Tensor, *others: Any, **named: Any) -> Tensor:
        added = plain(x, *others, **named)
        seen.append((added if branches else x, added if branches else added - x))
        return added

    branch.call = noting
    module.register_forward_hook(lambda _, __, output: seen.append((output, branch.factor_n)))
    step(rig, make_batch(problem.spec, 16))
    (x, added), (output, factor_n) = seen
    assert {round(each, 5) for each in factor_n.tolist()} == {0.0, 2.5}
    scaled = added * factor_n.view(-1, *[1] * (added.dim() - 1))
    assert torch.allclose(output, scaled if branches else x + scaled, atol=1e-6)


def test_the_share_that_is_left_out_grows_with_depth() -> None:
    draws = Draws(two_branches(3), 0.5, seed=0)
    draws.num_samples = draws.num_in_batch = 2000
    factors = draws.factors(2000, CPU)
    shares = (factors == 0).float().mean((1, 2)).tolist()
    assert shares == pytest.approx([0, 0.25, 0.5], abs=0.03)
    assert factors.mean((1, 2)).tolist() == pytest.approx([1, 1, 1], abs=0.06)


# Parts, ranks, recomputation


CASES = [(DROP, "transformer"), (DROP, "resnet_group"), (STOCHASTIC, "transformer"), (STOCHASTIC, "resnet_group")]


@pytest.mark.parametrize(("knob", "problem"), CASES)
def test_parts_give_the_step_of_the_whole_batch(knob: Knob, problem: str) -> None:
    whole, parts = (
        train(PROBLEMS[problem], knobs_of(depth=knob, accum=accum, optimizer="sgd"), [16, 13], lr=0.01)
        for accum in ("none", "x4")
    )
    assert relative_error(parts.gradients, whole.gradients) < 2e-6


def test_each_rank_draws_its_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what one process draws for the whole batch."""

    def factors_of(num_samples: int, this: int, ranks: int) -> Tensor:
        monkeypatch.setattr(Ranks, "rank", this)
        monkeypatch.setattr(Ranks, "size", ranks)
        draws = Draws(two_branches(3), 0.6, seed=0)
        parts = Parts(2).split(my_slice(Part(torch.zeros(num_samples, 1), torch.zeros(num_samples))))
        draws.run(lambda rig, parts, total: total, Mock(), parts, torch.tensor(1))
        return torch.cat([draws.factors(part.num_samples, CPU) for part in parts], -1)

    for num_samples in (12, 13, 14):
        of_ranks = [factors_of(num_samples, this, 3) for this in range(3)]
        assert torch.cat(of_ranks, -1).equal(factors_of(num_samples, 0, 1))


def two_branches(num_blocks: int) -> list[list[Branch]]:
    return [[Added(nn.Identity()), Added(nn.Identity())] for _ in range(num_blocks)]


@pytest.mark.slow
@pytest.mark.parametrize("problem", ["transformer", "resnet_group"])
def test_ranks_give_the_step_of_the_whole_batch(problem: str) -> None:
    task = PROBLEMS[problem]
    choices = [
        knobs_of(depth=knob, sharding=sharding, optimizer="sgd", accum="x2")
        for knob, sharding in ((DROP, "ddp"), (DROP, "fsdp"), (STOCHASTIC, "fsdp"))
    ]
    plain = {knob: train(task, knobs_of(depth=knob, optimizer="sgd"), [8, 9]) for knob in (DROP, STOCHASTIC)}
    for of_rank in on_ranks(train_all, task, choices):
        for knob, found in zip((DROP, DROP, STOCHASTIC), of_rank, strict=True):
            assert relative_error(found.gradients, plain[knob].gradients) < 1e-5
            assert relative_error(found.parameters, plain[knob].parameters) < 1e-5


def train_all(task: Problem, choices: list[dict[str, Knob]]) -> list[Trained]:
    return [train(task, knobs, [8, 9]) for knobs in choices]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("knob", "problem"), [(DROP, "transformer"), (STOCHASTIC, "transformer"), (STOCHASTIC, "resnet")]
)
@pytest.mark.parametrize(
    "others",
    [
        {"ckpt": "every1"},
        {"ckpt": "sqrt"},
        {"ckpt": "selective"},
        {"stepping": "in_backward"},
        {"stepping": "cpu_offload"},
        {"offload": "parameters"},
        {"offload": "activations"},
    ],
    ids=lambda choices: "=".join(*choices.items()),
)
def test_exact_knobs_keep_its_numbers(knob: Knob, problem: str, others: dict[str, str]) -> None:
    one, other = (
        train(PROBLEMS[problem], knobs_of(depth=knob, optimizer="sgd", **choices), [8] * 3, lr=0.01)
        for choices in (others, {})
    )
    assert one.losses == other.losses
    assert relative_error(one.gradients, other.gradients) == 0
    assert relative_error(one.buffers, other.buffers) == 0 if one.buffers else True


@pytest.mark.sampled
@pytest.mark.parametrize("knob", [DROP, STOCHASTIC])
@pytest.mark.parametrize(
    "others",
    [{}, {"stepping": "in_backward"}, {"precision": "fp16"}, {"adapter": "badam"}, {"sparsity": Magnitude(steps=6)}],
)
def test_a_run_goes_on_as_if_it_had_not_been_interrupted(knob: Knob, others: dict[str, str | Knob]) -> None:
    def go(rig: Rig, steps: Iterable[int]) -> list[Tensor]:
        return [step(rig, make_batch(TOKENS, 8, seed))[0] for seed in steps]

    whole, first, second = (rig_of("transformer", depth=knob, **others) for _ in range(3))
    wanted = go(whole, range(6))
    go(first, range(3))
    load_whole(second.model, trained_state(first.model))
    second.stepper.load_state_dict(first.stepper.state_dict())
    assert go(second, range(3, 6)) == wanted[3:]
    assert relative_error(dict(second.model.named_parameters()), dict(whole.model.named_parameters())) == 0


# With other options


@pytest.mark.parametrize(
    ("knob", "problem", "others"),
    first_of(
        [
            (DROP, "transformer", {"adapter": BAdam(every=1)}),
            (DROP, "resnet_group", {"ckpt": "every2"}),
            (STOCHASTIC, "transformer", {"ckpt": "every1"}),
            *((knob, problem, {}) for knob, problem in CASES),
        ],
        3,
    ),
)
def test_a_plan_is_what_is_measured(knob: Knob, problem: str, others: dict[str, str | Knob]) -> None:
    knobs = knobs_of(depth=knob, **others)
    task = PROBLEMS[problem]
    rig, batch = assemble(task, knobs, CPU), make_batch(task.spec, 8)
    step(rig, batch)
    fix_heaviest(rig, batch)
    with ledger(rig.model, rig.stepper, batch.tensors(), CPU) as peak:
        step(rig, batch)
    assert peak_as_planned(task, knobs, 8).peak_bytes == peak.peak_bytes


@pytest.mark.parametrize(
    ("problem", "ckpt"),
    first_of([(model, ckpt) for ckpt in ("every2", "none", "every1") for model in reversed(FIVE_BLOCKS)], 1),
)
def test_no_draw_takes_more_memory_than_the_planned_one(problem: str, ckpt: str) -> None:
    task, knobs = FIVE_BLOCKS[problem], knobs_of(depth=LayerDrop(2), ckpt=ckpt)
    rig, batch, peaks = assemble(task, knobs, CPU), make_batch(task.spec, 8), list[int]()
    for _ in range(16):
        step(rig, batch)
        with ledger(rig.model, rig.stepper, batch.tensors(), CPU) as peak:
            step(rig, batch)
        peaks.append(peak.peak_bytes)
    assert max(peaks) <= peak_as_planned(task, knobs, 8).peak_bytes


def test_masks_and_draws_both_act() -> None:
    """Each wraps the stepper."""
    rig = rig_of("transformer", depth=DROP, sparsity=Magnitude(share=0.5, steps=1))
    step(rig, make_batch(TOKENS, 8))
    step(rig, make_batch(TOKENS, 8))
    assert len(numbers_skipped(rig)) == 1
    weight = rig.model.get_parameter("blocks.1.mlp.up.weight")
    assert (weight == 0).any()


def test_blocks_that_rest_may_be_skipped() -> None:
    rig = rig_of("transformer", depth=LayerDrop(2), adapter=BAdam(every=1))
    for seed in range(6):
        assert step(rig, make_batch(TOKENS, 8, seed))[1].applied


def test_zeroth_order_draws_once_a_step() -> None:
    """Both of its passes over the parts see the same factors."""
    rig = rig_of("transformer", depth=STOCHASTIC, stepping="zeroth_order", accum="x2")
    attention, factors = rig.structure.modules(rig.structure.get(BRANCHES)[-1])[0], list[Tensor]()
    attention.register_forward_hook(lambda *_: factors.append(vars(attention)["forward"].factor_n))
    step(rig, make_batch(TOKENS, 32))
    assert len(factors) == 4
    assert factors[0].equal(factors[2])
    assert factors[1].equal(factors[3])
    assert not factors[0].equal(factors[1])


# Facts


@pytest.mark.slow
def test_without_every_block() -> None:
    """A whole model would be compiled for each draw."""
    rig, graphs = rig_of("transformer", depth=DROP), list[object]()

    def count(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    rig.model.compile(backend=count)
    for seed in range(12):
        step(rig, make_batch(TOKENS, 8, seed))
    assert len(graphs) == 3
    with pytest.raises(Incompatible, match="compile=model needs that every block computes in every step"):
        rig_of("transformer", depth=DROP, compile="model")


def two_losses(rig: Rig) -> list[float]:
    return [float(step(rig, make_batch(TOKENS, 8))[0]) for _ in range(2)]


@pytest.mark.parametrize("knob", [DROP, STOCHASTIC])
def test_without_fixed_blocks(knob: Knob) -> None:
    """A trace repeats the step that was recorded."""
    rig, other = (rig_of("transformer", depth=knob, optimizer="sgd") for _ in range(2))
    for block in rig.structure.blocks:
        branches = [module for module in block.modules() if "forward" in vars(module)]
        traced = Traced(block)
        block.forward = traced
        assert branches
    wanted = two_losses(other)
    try:
        assert two_losses(rig) != wanted
    except Incompatible as error:
        assert "doesn't compute any more what was recorded" in str(error)  # noqa: PT017
    with pytest.raises(Incompatible, match="compile=torchscript needs that a block computes the same in every step"):
        rig_of("transformer", depth=knob, compile="torchscript")


def test_without_separate_samples() -> None:
    """A few samples at a time would need a few factors at a time."""
    rig = rig_of("transformer", depth=STOCHASTIC)
    for block in rig.structure.blocks:
        block.forward = Tiled(block, block.forward, 0, 2)
    with pytest.raises(RuntimeError, match="size"):
        step(rig, make_batch(TOKENS, 8))
    with pytest.raises(
        Incompatible, match="tile=blocks needs that the blocks compute each sample from that sample alone"
    ):
        rig_of("transformer", depth=STOCHASTIC, tile="blocks")


# What is refused, what the row says


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LayerDrop(0), r"depth\.count=0: must be at least 1"),
        (lambda: StochasticDepth(1.0), r"depth\.rate=1\.0: must be at least 0 and less than 1"),
        (lambda: StochasticDepth(float("nan")), r"depth\.rate=nan"),
        (lambda: rig_of("transformer", depth=LayerDrop(3)), r"depth\.count=3: must be less than 3"),
    ],
)
def test_a_number_out_of_range_is_refused(make: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        make()


def test_a_model_whose_blocks_all_change_the_shape_is_refused() -> None:
    task = Auto().pose(replace(RESNET, layers=[1, 1], block=BlockKind.bottleneck, norm=NormKind.group), IMAGES)
    with pytest.raises(Incompatible, match=r"needs that the inputs of several blocks .* depth=none$"):
        assemble(task, knobs_of(depth=DROP), CPU)
    assert step(assemble(task, knobs_of(depth=STOCHASTIC), CPU), make_batch(IMAGES, 8))[1].applied


def test_the_row_says_what_is_left_out() -> None:
    model = PROBLEMS["transformer"].make_model()
    assert LayerDrop().caveat(model) == "1 block is skipped in each step, drawn anew (none in evaluations)"
    assert LayerDrop(2).caveat(model) == "2 blocks are skipped in each step, drawn anew (none in evaluations)"
    assert "0.6 of them" in STOCHASTIC.caveat(model)


def test_without_undoable_steps() -> None:
    """The next step draws other blocks, also after an update that was left out."""
    assert leaves_something_behind(depth=DROP)
    assert leaves_something_behind(depth=STOCHASTIC)
    assert not leaves_something_behind()
