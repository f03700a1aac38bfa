"""train.on_nonfinite=skip: a step that isn't finite leaves nothing behind, and too many in a row end the run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowvram.compat.torch_trees import tree_leaves
from lowvram.config.errors import Incompatible
from lowvram.config.training import OnNonfinite
from lowvram.core.assemble import assemble
from lowvram.core.generators import seed_all
from lowvram.core.knob import Knob
from lowvram.core.mesh import all_ranks
from lowvram.core.rig import Part, Rig
from lowvram.core.shards import local
from lowvram.core.step import step
from lowvram.knobs.precision import Fp16
from lowvram.knobs.stepping import CpuOffload, InBackward, Norm, SumsIn
from lowvram.loops.measure import Measure
from lowvram.loops.session import Interrupted, NonFinite, Session
from lowvram.loops.skipping import Skips, Touched
from lowvram.loops.train import Train
from tests.laboratory import CPU, PROBLEMS, knobs_of, make_batch, peak_as_measured, peak_as_planned
from tests.loops.sessions import Told, session_in
from tests.ranks import on_ranks

pytestmark = pytest.mark.medium

MakeSession = Callable[..., Session]
SKIP: dict[str, Any] = {"on_nonfinite": OnNonfinite.skip}
POISONS = ("loss", "gradient", "both")


class Poison:
    """Makes the loss of some parts nan, their gradients, or both."""

    def __init__(self, rig: Rig, what: str) -> None:
        self.what, self.criterion, self.at, self.num_parts = what, rig.criterion, set[int](), 0

    def __call__(self, outputs: Any, part: Part) -> Tensor:
        loss, self.num_parts = self.criterion(outputs, part), self.num_parts + 1
        if not torch.is_grad_enabled() or self.num_parts not in self.at:
            return loss
        if self.what == "loss":
            return loss + math.nan  # its gradients are finite
        if self.what == "both":
            return loss * math.nan
        return with_gradient_of_nan(loss)


def with_gradient_of_nan(loss: Tensor) -> Tensor:
    poisoned = loss * 1
    poisoned.register_hook(lambda gradient: gradient * math.nan)
    return poisoned


def poisoned(rig: Rig, what: str = "both") -> tuple[Rig, Poison]:
    poison = Poison(rig, what)
    return replace(rig, criterion=poison), poison


CHOICES: dict[str, dict[str, str | Knob]] = {
    "plain": {},
    "bf16, accum, ckpt": {"precision": "bf16", "accum": "x2", "ckpt": "every2"},
    "bf16_pure": {"precision": "bf16_pure"},
    "in_backward": {"stepping": InBackward(clip=0.5), "accum": "x2"},
    "two_passes": {"stepping": InBackward(clip=0.5, norm=Norm.two_passes)},
    "cpu_offload": {"stepping": CpuOffload(clip=0.5, offload_fraction=0.6), "accum": "x2"},
    "sgd, clip": {"optimizer": "sgd", "accum": "x2"},
    "weights=stream": {"weights": "stream"},
}


def state_of(rig: Rig) -> list[Any]:
    tensors = [*rig.model.state_dict().values(), *tree_leaves(rig.stepper.state_dict())]
    return [each.clone() if isinstance(each, Tensor) else each for each in tensors]


def own(value: Any) -> Any:
    """This rank's shard of a sharded tensor."""
    return local(value) if isinstance(value, Tensor) else value


def are_same(one: list[Any], other: list[Any]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


@pytest.mark.sampled
@pytest.mark.parametrize("what", POISONS)
@pytest.mark.parametrize("problem", ["transformer_dropout", "resnet"])
@pytest.mark.parametrize("choices", CHOICES.values(), ids=CHOICES)
def test_training_goes_on_as_if_the_batch_had_not_been_there(
    problem: str, choices: dict[str, str | Knob], what: str
) -> None:
    """Weights, the optimizer's states, running statistics and random numbers, to the last bit."""
    task, found = PROBLEMS[problem], []
    for bad in (None, 1, 2):  # the batch that is poisoned, in its last part
        skips = Skips(5)
        rig, poison = poisoned(assemble(task, {**knobs_of(**choices), **skips.knobs()}, CPU), what)
        seed_all(0)
        batches, num_parts = [make_batch(task.spec, 4, seed) for seed in range(3)], 2 if "accum" in choices else 1
        if bad is not None:
            batches.insert(bad, make_batch(task.spec, 4, 99))
            poison.at = {(bad + 1) * num_parts}
        updates = [step(rig, batch)[1] for batch in batches]
        assert [update.skipped for update in updates] == [place == bad for place in range(len(batches))]
        assert rig.stepper.figures()["training.skipped_steps"] == skips.num == (bad is not None)
        found.append([*state_of(rig), torch.rand(3)])
    assert are_same(found[0], found[1])
    assert are_same(found[0], found[2])


def test_a_step_that_is_finite_is_not_changed_by_it() -> None:
    task, found = PROBLEMS["resnet"], []
    for skips in (Skips(None), Skips(3)):
        rig = assemble(task, {**knobs_of(), **skips.knobs()}, CPU)
        seed_all(0)
        found.append([step(rig, make_batch(task.spec, 4, 0))[0], *state_of(rig)])
    assert are_same(*found)


@pytest.mark.parametrize(
    "choices",
    [
        {"stepping": "in_backward"},
        {"stepping": InBackward(clip=1.0, norm=Norm.last_step)},
        {"stepping": InBackward(clip=1.0, sums=SumsIn.bf16), "accum": "x2"},
        {"stepping": "zeroth_order"},
        {"activations": "int8"},
        {"depth": "stochastic"},
        {"adapter": "badam"},
    ],
)
def test_what_leaves_something_behind_is_refused(choices: dict[str, str | Knob]) -> None:
    with pytest.raises(Incompatible, match=r"train\.on_nonfinite=skip needs that a step whose update is left out"):
        assemble(PROBLEMS["transformer"], {**knobs_of(**choices), **Skips(3).knobs()}, CPU)


def with_poison(session: Session, at: set[int], what: str = "both") -> Session:
    rig, poison = poisoned(session.rig, what)
    poison.at = at
    return replace(session, rig=rig)


def test_a_run_skips_and_says_so(make_session: MakeSession, capsys: pytest.CaptureFixture[str]) -> None:
    """The skipped step counts as a step, is not logged, and doesn't move the schedule."""
    told = Told()
    row = Train().run(with_poison(make_session(told=told, **SKIP), {3}))
    assert row["training"]["skipped_steps"] == 1
    assert row["training"]["steps"] == 6
    assert [step for step, _ in told.values("loss/train")] == [1, 2, 4, 5, 6]
    assert "step 3 is skipped: its loss or a gradient isn't finite" in capsys.readouterr().out


def test_too_many_in_a_row_end_the_run_as_ever(make_session: MakeSession) -> None:
    """The last whole step is saved, and a run that goes on has counted those before."""
    for is_resumed in (False, True):
        session = make_session(max_skipped=2, steps=9, is_resumed=is_resumed, **SKIP)
        with pytest.raises(NonFinite, match="the gradients are not finite any more"):
            Train().run(with_poison(session, {2, 4, 5, 6} if not is_resumed else {1}))
    row = Train().run(make_session(max_skipped=2, steps=9, is_resumed=True, **SKIP))
    assert row["training"]["skipped_steps"] == 3
    assert row["training"]["steps"] == 9


def test_a_run_that_is_resumed_skips_as_one_that_was_not(make_session: MakeSession, tmp_path: Path) -> None:
    whole = Train().run(with_poison(session_in(tmp_path / "whole", "resnet", **SKIP), {2, 5}))
    with pytest.raises(Interrupted):
        Train().run(with_poison(make_session("resnet", told=Told(stop_at=3), **SKIP), {2}))
    row = Train().run(with_poison(make_session("resnet", is_resumed=True, **SKIP), {2}))
    assert row["loss"] == whole["loss"]
    assert row["training"] == whole["training"]


def test_the_loss_scale_comes_first(make_session: MakeSession) -> None:
    """What a smaller one mends is its matter; a batch that none mends is skipped, and halves it meanwhile."""
    choices = {"precision": Fp16(init_scale=2.0**24)}
    row = Train().run(make_session(choices=choices, steps=12, **SKIP))
    assert row["precision"]["skipped_steps"] > 0 == row["training"]["skipped_steps"]
    choices = {"precision": Fp16(init_scale=2.0**-13)}
    row = Train().run(with_poison(make_session(choices=choices, steps=9, **SKIP), {2, 4, 5}))
    assert (row["precision"]["skipped_steps"], row["training"]["skipped_steps"]) == (3, 2)


def test_a_measurement_skips_too(make_session: MakeSession) -> None:
    row = Measure().run(with_poison(make_session(**SKIP), {2}))
    assert row["training"]["skipped_steps"] == 1


def test_only_as_much_is_kept_as_steps_change() -> None:
    """A large buffer isn't copied: a step that has changed it can't be undone, and says so."""

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("large", torch.zeros(2**15))
            self.register_buffer("small", torch.zeros(4))
            self.count = 0

    module = Large()
    touched = Touched([module])
    for _ in range(2):
        touched.look()
        small = module.get_buffer("small")
        module.small, module.count = torch.ones(4), 3
        small.add_(1)
        touched.put_back()
        assert module.small is small
        assert (module.small.sum().item(), module.count) == (0, 0)
    assert sum(held.copy.numel() for held in touched.held if held.copy is not None) == 4
    touched.look()
    module.get_buffer("large").add_(1)
    with pytest.raises(Incompatible, match=r"has changed Large.large, a buffer too large to be copied in each step"):
        touched.put_back()


def trained_on_ranks(folder: Path, choices: dict[str, Any], at: dict[int, set[int]]) -> Any:
    told = Told()
    session = session_in(folder, "resnet_group", choices=choices, told=told, **SKIP)
    row = Train().run(with_poison(session, at.get(all_ranks().rank, set())))
    return [step for step, _ in told.values("loss/train")], row["training"], row["loss"]


def is_undone_on_ranks(option: str) -> bool:
    """Whether this rank is where it would be without a batch of which the last rank's part is poisoned."""
    task, found = PROBLEMS["resnet"], []
    for bad in (None, 2):
        rig, poison = poisoned(assemble(task, {**knobs_of(sharding=option), **Skips(5).knobs()}, CPU))
        seed_all(0)
        batches = [
            make_batch(task.spec, 4, all_ranks().rank + 10 * number) for number in range(3 if bad is None else 4)
        ]
        if bad is not None:
            batches = [batches[0], batches[3], *batches[1:3]]
            poison.at = {bad} if all_ranks().rank else set()
        assert sum(step(rig, batch)[1].skipped for batch in batches) == (bad is not None)
        found.append([own(each) for each in state_of(rig)])
    return are_same(*found)


@pytest.mark.parametrize("option", ["ddp", "fsdp"])
def test_ranks_undo_alike(option: str) -> None:
    """Running statistics too, of which each step takes the mean over the ranks."""
    assert on_ranks(is_undone_on_ranks, option) == [True, True]


@pytest.mark.parametrize("option", ["ddp", "fsdp", "zero1"])
def test_ranks_skip_together(tmp_path: Path, option: str) -> None:
    """One part of one rank is poisoned."""
    choices = {"sharding": option, "accum": "x2"}
    one, other = on_ranks(trained_on_ranks, tmp_path, choices, {1: {4}})
    assert one[0] == [1, 3, 4, 5, 6]
    assert one[1]["skipped_steps"] == other[1]["skipped_steps"] == 1
    assert one[2] == other[2]
    alone = trained_on_ranks(tmp_path / "alone", {"accum": "x2"}, {0: {4}})
    assert one[2] == {name: pytest.approx(value, rel=1e-3) for name, value in alone[2].items()}


@pytest.mark.parametrize("problem", ["resnet", "transformer"])
def test_plans_count_what_it_keeps(problem: str) -> None:
    """A copy of each running statistic; of a model without any next to nothing."""
    task = PROBLEMS[problem]
    plain, skipping = (
        [found(task, {**knobs_of(), **skips.knobs()}, 8).peak_bytes for found in (peak_as_measured, peak_as_planned)]
        for skips in (Skips(None), Skips(3))
    )
    num_buffers = len(list(task.make_model().buffers()))
    assert plain[0] == plain[1]
    assert skipping[0] == skipping[1] > plain[0]
    assert skipping[0] - plain[0] <= 512 * (num_buffers + 2)  # as an allocator rounds
