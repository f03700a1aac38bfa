"""schedule.batch_start: batches that grow, in parts of one size, exactly resumed and over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lowvram.config.errors import BadInput
from lowvram.core.mesh import Ranks
from lowvram.core.rig import Part
from lowvram.core.slices import begin_of, most_in_slice
from lowvram.core.step import step
from lowvram.data.bucketed import Bucketed
from lowvram.data.loader import Inline
from lowvram.data.packed import Packed
from lowvram.knobs.accum import in_parts_of_largest
from lowvram.loops.measure import Measure
from lowvram.loops.schedule import BatchRule, Constant, Cosine, WarmupCosine
from lowvram.loops.session import Interrupted, Session
from lowvram.loops.setup import check_batch_warmup, with_steps
from lowvram.loops.train import Train
from tests.loops.sessions import Told, session_in
from tests.ranks import on_ranks

MakeSession = Callable[..., Session]
GROWING = Cosine(batch_start=2, batch_warmup_samples=24)
COMMON: dict[str, Any] = {"schedule": GROWING, "batch_size": 8, "steps": 9}
SIZES = [2, 2, 2, 2, 4, 4, 6, 6, 8, 8]


def parts_of(session: Session, batch: Part) -> list[int]:
    return [part.num_samples for part in session.rig.split(batch)]


def test_batches_grow_and_parts_keep_their_size(make_session: MakeSession) -> None:
    session = make_session(choices={"accum": "x4"}, **COMMON).growing()
    batches = session.batches(0)
    for size in SIZES:
        assert parts_of(session, next(batches)) == [2] * (size // 2)


@pytest.mark.parametrize(("start", "parts"), [(1, [1]), (3, [2, 1]), (5, [2, 2, 1])])
def test_parts_are_never_larger(make_session: MakeSession, start: int, parts: list[int]) -> None:
    schedule = replace(GROWING, batch_start=start)
    session = make_session(choices={"accum": "x4"}, schedule=schedule, batch_size=8).growing()
    assert parts_of(session, next(session.batches(0))) == parts


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_ranks_have_equally_many_parts_and_none_is_larger(monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> None:
    """Each part is no larger than the same part of the largest batch, whose memory was planned."""
    monkeypatch.setattr(Ranks, "size", num_ranks)
    for num_parts, batch_size in product((1, 2, 3), range(3 * num_ranks, 9 * num_ranks)):
        split, own = in_parts_of_largest(batch_size, num_parts), most_in_slice(batch_size, num_ranks)
        largest = [most_in_slice(own - place, num_parts) for place in range(num_parts)]
        for size in range(num_ranks, batch_size + 1):
            if size % num_ranks and batch_size == num_ranks * num_parts:
                continue  # refused
            begins = [begin_of(size, rank, num_ranks) for rank in range(num_ranks + 1)]
            of_ranks = [
                [part.num_samples for part in split(Part(None, torch.zeros(end - begin), num_in_batch=size))]
                for begin, end in pairwise(begins)
            ]
            assert len(set(map(len, of_ranks))) == 1
            assert all(one <= other for parts in of_ranks for one, other in zip(parts, largest, strict=False))
            assert [sum(parts) for parts in of_ranks] == [end - begin for begin, end in pairwise(begins)]


def test_only_training_grows(make_session: MakeSession) -> None:
    told = Told()
    row = Measure().run(make_session(told=told, **COMMON))
    assert told.values("data/batch_size") == []
    assert row["throughput"]["samples_per_s"] > 0
    plain = make_session(batch_size=8)
    assert plain.growing() is plain


@pytest.mark.parametrize("problem", ["transformer_dropout", "resnet"])
def test_a_stopped_run_goes_on_to_the_last_digit(make_session: MakeSession, problem: str) -> None:
    whole, first, second = Told(), Told(stop_at=4), Told()
    common = {**COMMON, "choices": {"accum": "x2"}}
    uninterrupted = make_session(problem, told=whole, **common)
    row = Train().run(uninterrupted)
    folder = uninterrupted.folder / "stopped"
    folder.mkdir()
    with pytest.raises(Interrupted):
        Train().run(replace(make_session(problem, told=first, **common), folder=folder))
    Train().run(replace(make_session(problem, told=second, is_resumed=True, **common), folder=folder))
    for name in ("loss/train", "lr", "data/batch_size", "data/samples"):
        assert first.values(name) + second.values(name) == whole.values(name)
    assert [int(size) for _, size in whole.values("data/batch_size")] == SIZES[:9]
    assert whole.values("data/samples")[-1] == (9, sum(SIZES[:9]))
    assert row["throughput"]["samples_per_s"] > 0


def test_throughput_counts_the_samples_that_there_were(make_session: MakeSession) -> None:
    told = Told()
    Train().run(make_session(told=told, **COMMON))
    speeds, times = told.values("throughput/samples_per_s"), told.values("time/step_ms")
    counted = [speed * ms / 1e3 for (_, speed), (_, ms) in zip(speeds, times, strict=True)]
    assert counted == pytest.approx(SIZES[:9])


def test_the_learning_rate_goes_by_samples_and_its_rule_by_the_largest_batch(make_session: MakeSession) -> None:
    """As GPT-3's, whose learning rate follows tokens and not the batch."""
    sizes = GROWING.sizes(8)
    plain, many = (replace(GROWING, batch_start=None, batch_warmup_samples=None).sizes(size) for size in (8, 1))
    for number in range(9):
        assert GROWING.factor(number, 9, sizes) == pytest.approx(
            Cosine().factor(sizes.before(number), sizes.before(8) + 1, many)
        )
    ruled = replace(GROWING, batch_rule=BatchRule.linear, base_batch_size=2)
    assert [ruled.factor(n, 9, sizes) / GROWING.factor(n, 9, sizes) for n in range(9)] == [4.0] * 9
    warm = WarmupCosine(warmup_samples=16, batch_start=2, batch_warmup_samples=24)
    factors = [warm.factor(number, 9, sizes) for number in range(9)]
    assert factors[:4] == pytest.approx([2 / 18, 4 / 18, 6 / 18, 8 / 18])
    assert factors[6] == 1.0
    assert plain.before(9) == 72


def losses_on_ranks(folder: Path, choices: dict[str, Any], more: dict[str, Any]) -> list[tuple[int, float]]:
    told = Told()
    Train().run(session_in(folder, "transformer", choices=choices, told=told, **{**COMMON, **more}))
    return told.values("loss/train")


@pytest.mark.slow
@pytest.mark.parametrize(("option", "num_ranks"), [("ddp", 2), ("fsdp", 2), ("fsdp", 3)])
def test_ranks_train_as_one_process(tmp_path: Path, option: str, num_ranks: int) -> None:
    """Three ranks have unequal slices, and in a small batch fewer samples than parts."""
    common = {} if num_ranks == 2 else {"batch_size": 10, "schedule": replace(GROWING, batch_start=4)}
    choices = {"accum": "x2", "sharding": option}
    wanted = losses_on_ranks(tmp_path / "one", {"accum": "x2"}, common)
    for found in on_ranks(losses_on_ranks, tmp_path / "many", choices, common, num_ranks=num_ranks):
        assert [loss for _, loss in found] == pytest.approx([loss for _, loss in wanted], rel=1e-4)


def test_gradients_are_those_of_whole_batches(make_session: MakeSession) -> None:
    whole, parts = (make_session(choices={"accum": each}, **COMMON).growing() for each in ("none", "x4"))
    for session in (whole, parts):
        session.rig.stepper.set_lr(0.01)
    for ours, theirs, _ in zip(whole.batches(0), parts.batches(0), range(6), strict=False):
        assert float(step(parts.rig, theirs)[0]) == pytest.approx(float(step(whole.rig, ours)[0]), rel=1e-4)


def test_epochs_are_counted_in_samples(make_session: MakeSession) -> None:
    session = make_session(schedule=GROWING, batch_size=8, epochs=2)
    steps = with_steps(session.settings, session.data).train.steps
    sizes = GROWING.sizes(8)
    assert sizes.before(steps - 1) < 2 * len(session.data.train) <= sizes.before(steps)


def checked(start: int, loader: Any, num_ranks: int, num_parts: int = 1) -> None:
    groups = {"schedule": Constant(batch_start=start, batch_warmup_samples=64), "loader": loader}
    settings: Any = SimpleNamespace(groups=groups, train=SimpleNamespace(batch_size=8), num_parts=num_parts)
    check_batch_warmup(settings, num_ranks)


def test_what_can_not_grow_says_so() -> None:
    checked(2, Inline(), 2)
    checked(3, Inline(), 2)
    for start, num_ranks in ((2, 3), (10, 1)):
        with pytest.raises(BadInput, match=rf"^schedule\.batch_start={start}: must be at most 8 \(train\.batch_size\)"):
            checked(start, Inline(), num_ranks)
    with pytest.raises(
        BadInput, match=r"^schedule\.batch_start=3: must be a multiple of 2, the number of ranks, where"
    ):
        checked(3, Inline(), 2, 4)
    for loader in (Bucketed(), Packed()):
        with pytest.raises(BadInput, match=r"^schedule\.batch_start=2: must be null with this option of loader"):
            checked(2, loader, 1)
    with pytest.raises(BadInput, match=r"^schedule\.batch_warmup_samples=null: must be at least 1 with schedule"):
        Constant(batch_start=2)
    with pytest.raises(BadInput, match=r"^schedule\.batch_start=null: must be at least 1 with schedule"):
        Constant(batch_warmup_samples=100)
