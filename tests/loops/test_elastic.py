"""A run may go on with another number of ranks and another sharding: k steps, a snapshot and k steps elsewhere are 2k
steps of one process, with the same samples in the same order. In fp64 losses are equal to 1e-12."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from lowvram.core.knob import Knob
from lowvram.core.mesh import data_ranks
from lowvram.core.states import Frozen
from lowvram.data.spec import DataSpec, Modality
from lowvram.knobs.accum import Parts
from lowvram.knobs.sharding import FSDP, ContextParallel, PipelineParallel, TensorParallel, ZeRO1
from lowvram.loops.session import Interrupted
from lowvram.loops.train import Train
from lowvram.tasks import Auto, Problem
from tests.laboratory import PROBLEMS, TRANSFORMER, InDouble
from tests.loops.sessions import Told, session_in
from tests.ranks import on_ranks
from tests.tiers import first_of

pytestmark = pytest.mark.medium

Choices = dict[str, str | Knob]
Losses = list[tuple[int, float]]
K = 2


class Double(InDouble):
    """A problem in fp64, with all that a session asks a problem for."""

    def __getattr__(self, name: str) -> Any:
        if name == "problem":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.problem, name)

    def call(self, model: nn.Module, inputs: Any) -> Any:
        return super().call(model, inputs.double() if inputs.is_floating_point() else inputs)


THREE_TOKENS = DataSpec(Modality.TOKENS, 3, (8,))  # so that of four ranks one has no row of the head's weight
SMALL: Any = Double(Auto().pose(replace(TRANSFORMER, num_layers=2), THREE_TOKENS))
WIDE: Any = Double(Auto().pose(replace(TRANSFORMER, num_layers=2, width=64), THREE_TOKENS))


NAMED: dict[str, Choices] = {
    "hsdp": {"sharding": FSDP(replicate=2)},
    "rows": {"sharding": TensorParallel(tensor=2)},
    "sharded rows": {"sharding": FSDP(tensor=2)},
    "rows with shared states": {"sharding": ZeRO1(tensor=2)},
    "runs with shared states": {"sharding": ZeRO1(context=2)},
    "runs": {"sharding": ContextParallel(context=2)},
    "hosts": {"sharding": "fsdp", "offload": "parameters"},
    "stages": {"sharding": PipelineParallel(schedule="gpipe")},
    "rows of stages": {"sharding": PipelineParallel(pipeline=2, schedule="gpipe"), "accum": "x2"},
    "stages with shared states": {"sharding": PipelineParallel(pipeline=2, schedule="gpipe", copies="zero1")},
    "sharded stages": {"sharding": PipelineParallel(pipeline=2, schedule="gpipe", copies="fsdp"), "accum": "x2"},
    "rows with own tokens": {"sharding": FSDP(tensor=2, sequence=True)},
}


class Point(NamedTuple):
    """A sharding, on some ranks."""

    sharding: str
    num_ranks: int

    def choices(self) -> Choices:
        return {} if self.num_ranks == 1 else NAMED.get(self.sharding, {"sharding": self.sharding})


ALONE = Point("none", 1)
OPTIONS = ["ddp", "zero1", "fsdp"]
POINTS = [ALONE, *(Point(option, num) for num in (2, 3, 4) for option in OPTIONS), Point("hsdp", 4), Point("hosts", 2)]
POINTS += [Point("tensor", 2), Point("rows", 4), Point("sharded rows", 4)]
POINTS += [Point("context", 2), Point("runs", 4), Point("stages", 2), Point("rows of stages", 4)]
IN_ONE_FILE = ("none", "ddp", "context", "runs", "stages", "rows of stages")  # no rank has a part of a tensor
IN_ONE_FILE += ("stages with shared states", "sharded stages")  # as all pipelines


class Leg(NamedTuple):
    """Some steps of a run."""

    folder: Path
    batch_size: int = 12
    stop_at: int | None = None
    is_resumed: bool = False
    sharded_above_gib: float | None = None

    def train(self, task: Problem, choices: Choices) -> Losses:
        """The losses of its steps and, after the last one, the held-out one."""
        told = Told(stop_at=self.stop_at if data_ranks().is_first else None)
        session = session_in(
            self.folder,
            task,
            choices=choices,
            told=told,
            is_resumed=self.is_resumed,
            steps=2 * K,
            batch_size=self.batch_size,
            sharded_above_gib=self.sharded_above_gib,
        )
        try:
            Train().run(session)
        except Interrupted:
            return told.values("loss/train")
        return [*told.values("loss/train"), *told.values("loss/eval")]


def train_legs(task: Problem, choices: Choices, legs: list[Leg]) -> list[Losses]:
    return [leg.train(task, choices) for leg in legs]


def trained(point: Point, task: Problem, choices: Choices, legs: list[Leg]) -> list[Losses]:
    """The losses of each leg, which all ranks of the point know."""
    choices = {**choices, **point.choices()}
    if point == ALONE:
        return train_legs(task, choices, legs)
    of_ranks = on_ranks(train_legs, task, choices, legs, num_ranks=point.num_ranks)
    assert all(losses == of_ranks[0] for losses in of_ranks)
    return of_ranks[0]


def check_pairs(
    tmp_path: Path,
    sources: Iterable[Point],
    targets: Iterable[Point],
    batch_size: int,
    sharded_above_gib: float | None = None,
    task: Any = SMALL,
) -> None:
    """That each target goes on with what each source has saved."""
    (wanted,) = trained(ALONE, task, {}, [Leg(tmp_path / "wanted", batch_size)])
    assert [step for step, _ in wanted] == [1, 2, 3, 4, 4]
    legs = list[Leg]()
    for source in sources:
        leg = Leg(tmp_path / "-".join(map(str, source)), batch_size, stop_at=K, sharded_above_gib=sharded_above_gib)
        assert trained(source, task, {}, [leg]) == [near(wanted[:K])], source
        (saved,) = (leg.folder / "snapshots").iterdir()
        is_in_shards = sharded_above_gib is not None and source.sharding not in IN_ONE_FILE
        assert saved.suffix == (".shards" if is_in_shards else ".pt")
        legs.append(leg._replace(stop_at=None, is_resumed=True))
    for target in targets:
        copies = [leg._replace(folder=tmp_path / f"{leg.folder.name} {target}") for leg in legs]
        for leg, copy in zip(legs, copies, strict=True):
            shutil.copytree(leg.folder, copy.folder)
        for leg, found in zip(legs, trained(target, task, {}, copies), strict=True):
            assert found == near(wanted[K:]), f"{leg.folder.name} to {target}"


def near(losses: Losses, band: float = 1e-12) -> Any:
    return [(step, pytest.approx(loss, rel=band, abs=0)) for step, loss in losses]


def test_a_run_goes_on_elsewhere_with_the_same_losses(tmp_path: Path) -> None:
    check_pairs(tmp_path, [Point("zero1", 2)], [ALONE, Point("fsdp", 3)], 5)


def test_a_run_goes_on_elsewhere_with_shards_that_each_rank_has_written(tmp_path: Path) -> None:
    check_pairs(tmp_path, [Point("fsdp", 3)], [ALONE, Point("zero1", 2)], 5, sharded_above_gib=0.0)


def fail_in_third_step(leg: Leg, point: Point) -> str:
    """Of all ranks at once, so that none can talk to another any more. Returns the error."""
    session = session_in(leg.folder, SMALL, choices=point.choices(), steps=2 * K, batch_size=12, sharded_above_gib=0.0)
    split, batches = session.rig.split, list[Any]()

    def fail(batch: Any) -> Any:
        batches.append(batch)
        if len(batches) == K + 1:
            raise ValueError("broken")
        return split(batch)

    try:
        Train().run(replace(session, rig=replace(session.rig, split=fail)))
    except ValueError as error:
        return str(error)
    return "none"


def test_stages_that_fail_leave_no_part_of_a_snapshot(tmp_path: Path) -> None:
    leg = Leg(tmp_path / "found")
    assert on_ranks(fail_in_third_step, leg, Point("stages", 2)) == ["broken", "broken"]
    assert not list((leg.folder / "snapshots").glob("*"))


def test_ranks_that_fail_leave_their_shards_of_the_last_whole_step(tmp_path: Path) -> None:
    leg = Leg(tmp_path / "found")
    assert on_ranks(fail_in_third_step, leg, Point("fsdp", 2)) == ["broken", "broken"]
    (path,) = (leg.folder / "snapshots").iterdir()
    assert (path.name.partition(".")[0], path.suffix) == ("step_00000002", ".shards")
    assert not list(leg.folder.glob(".step_*"))
    (wanted,) = trained(ALONE, SMALL, {}, [Leg(tmp_path / "wanted")])
    (found,) = trained(ALONE, SMALL, {}, [leg._replace(is_resumed=True)])
    assert found == near(wanted[K:])


@pytest.mark.slow
@pytest.mark.parametrize(
    "sharding",
    ["none", *OPTIONS, "hsdp", "tensor", "rows", "sharded rows", "context", "runs", "stages", "rows of stages"],
)
@pytest.mark.parametrize(("batch_size", "sharded_above_gib"), [(12, None), (5, 0.0)])
def test_a_run_goes_on_with_any_sharding_on_any_number_of_ranks(
    tmp_path: Path, sharding: str, batch_size: int, sharded_above_gib: float | None
) -> None:
    """Among them all pairs of shardings, and with each of them all pairs of numbers of ranks. Five samples divide by no
    number of ranks, and of four ranks one has no row of the head's weight."""
    targets = [point for point in POINTS if point.sharding == sharding]
    check_pairs(tmp_path, POINTS, targets, batch_size, sharded_above_gib)


SHARED_STATES = [Point("rows with shared states", 4), Point("runs with shared states", 4)]
SHARED_STATES += [Point("stages with shared states", 4), Point("sharded stages", 4), Point("rows with own tokens", 4)]


@pytest.mark.slow
@pytest.mark.parametrize("point", SHARED_STATES, ids=str)
def test_a_run_goes_on_with_weights_or_states_shared_out_over_rows(tmp_path: Path, point: Point) -> None:
    others = [ALONE, Point("zero1", 3), Point("tensor", 2), Point("sharded rows", 4)]
    check_pairs(tmp_path, [point], [*others, *SHARED_STATES], 5, sharded_above_gib=0.0)
    check_pairs(tmp_path / "back", others, [point], 12)


IMAGES: dict[str, list[Point]] = {  # by norms: those over a batch are others where ranks have slices of it
    "resnet": [ALONE],
    "resnet_group": [ALONE, Point("zero1", 2), Point("fsdp", 3)],
}


@pytest.mark.parametrize("problem", first_of([*IMAGES]))
def test_a_run_of_a_resnet_goes_on_with_its_blocks_elsewhere(tmp_path: Path, problem: str) -> None:
    """Its blocks are of several kinds, and hold buffers that other ranks don't have."""
    task, stages = Double(PROBLEMS[problem]), Point("stages", 2)
    check_pairs(tmp_path, [stages], [*IMAGES[problem], stages], 12, task=task)
    check_pairs(tmp_path / "back", IMAGES[problem], [stages], 12, task=task)


# With frozen weights


def test_frozen_weights_whose_rows_do_not_divide_stay_out_of_snapshots(tmp_path: Path) -> None:
    """FSDP2 moves them to other memory on the ranks with fewer rows alone, and all ranks must save the same."""
    choices: Choices = {"adapter": "freeze"}
    (wanted,) = trained(ALONE, SMALL, choices, [Leg(tmp_path / "wanted")])
    leg = Leg(tmp_path / "found", stop_at=K)
    assert trained(Point("fsdp", 3), SMALL, choices, [leg]) == [near(wanted[:K])]
    (saved,) = (leg.folder / "snapshots").iterdir()
    assert {*torch.load(saved)["model"]} <= {"token_embedding.weight", "head.weight"}  # which are tied, and train
    assert trained(ALONE, SMALL, choices, [leg._replace(stop_at=None, is_resumed=True)]) == [near(wanted[K:])]


def changed_by_one_rank() -> tuple[set[str], set[str]]:
    """What a rank finds unchanged of two frozen weights, before and after it has heard of the others."""
    model = nn.Linear(3, 2).requires_grad_(False)
    frozen = Frozen(model)
    if not data_ranks().is_first:
        model.bias.add_(1)
    alone = frozen.unchanged()
    frozen.agree()
    return alone, frozen.unchanged()


def test_a_frozen_weight_that_one_rank_has_changed_is_saved_by_all() -> None:
    assert on_ranks(changed_by_one_rank) == [({"weight", "bias"}, {"weight"}), ({"weight"}, {"weight"})]


# With moments of few bits, in blocks that lie in one shard each


@pytest.mark.slow
@pytest.mark.parametrize("sharded_above_gib", [None, 0.0])
@pytest.mark.parametrize("source", [Point("zero1", 2), Point("fsdp", 3), Point("hsdp", 4), ALONE], ids=str)
@pytest.mark.parametrize("optimizer", ["adamw_8bit", "adamw_4bit"])
def test_codes_stay_as_they_are_in_the_same_blocks_and_are_rounded_again_in_others(
    tmp_path: Path, optimizer: str, source: Point, sharded_above_gib: float | None
) -> None:
    """On three ranks one has codes of a weight of which the others have numbers, as their rows are no whole blocks."""
    choices: Choices = {"optimizer": optimizer}
    rounded = {"adamw_8bit": 1e-3, "adamw_4bit": 1e-2}[optimizer]
    (wanted,) = trained(source, WIDE, choices, [Leg(tmp_path / "wanted")])
    leg = Leg(tmp_path / "found", stop_at=K, sharded_above_gib=sharded_above_gib)
    assert trained(source, WIDE, choices, [leg]) == [wanted[:K]]
    for target, band in {**dict.fromkeys([ALONE, Point("zero1", 2), Point("fsdp", 3)], rounded), source: 0.0}.items():
        copy = leg._replace(folder=tmp_path / f"found {target}", stop_at=None, is_resumed=True)
        shutil.copytree(leg.folder, copy.folder)
        (found,) = trained(target, WIDE, choices, [copy])
        assert found == near(wanted[K:], band), target


@pytest.mark.slow
@pytest.mark.parametrize("source", [Point("tensor", 2), Point("rows with shared states", 4)], ids=str)
def test_codes_of_parts_of_layers_are_rounded_again_elsewhere(tmp_path: Path, source: Point) -> None:
    """Two ranks of zero1 have as many rows of queries, keys and values as two that split them, but other ones."""
    choices: Choices = {"optimizer": "adamw_8bit"}
    (wanted,) = trained(source, WIDE, choices, [Leg(tmp_path / "wanted")])
    leg = Leg(tmp_path / "found", stop_at=K)
    assert trained(source, WIDE, choices, [leg]) == [wanted[:K]]
    for target, band in {ALONE: 1e-3, Point("zero1", 2): 1e-3, source: 0.0}.items():
        copy = leg._replace(folder=tmp_path / f"found {target}", stop_at=None, is_resumed=True)
        shutil.copytree(leg.folder, copy.folder)
        (found,) = trained(target, WIDE, choices, [copy])
        assert found == near(wanted[K:], band), target


# With what else a run is made of

EXACT = ["adamw", "sgd", "adam_mini", "lamb", "lars"]
ROUNDING = ["muon"]  # products in bf16
WHOLE = ["adafactor", "adamw_companded", "sgd_companded", "muon_companded", "apollo", "sinkgd"]


def drawn(random: Random) -> tuple[Point, Point, Choices]:
    """Two points, and what both allow."""
    one, other = random.choice(POINTS), random.choice(POINTS)
    shardings = {one.sharding, other.sharding}
    has_whole_updates = shardings <= {"none", "ddp", "context", "runs"}
    has_own_backward = shardings <= {"none", "fsdp", "hsdp"}
    steppings = ["after_backward", "in_backward", "cpu_offload"] if has_own_backward else ["after_backward"]
    choices: Choices = {
        "optimizer": random.choice([*EXACT, *ROUNDING, *(WHOLE if has_whole_updates else [])]),
        "stepping": random.choice(steppings),
        "accum": random.choice(["none", "x2", Parts(3)]),
        "ckpt": random.choice(["none", "every1", "every2"]),
        "precision": random.choice(["fp32", "fp32", "fp16"]),
    }
    return one, other, choices


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20261128, 20261128 + 30))
def test_with_any_optimizer_stepping_parts_and_precision(tmp_path: Path, seed: int) -> None:
    """Where weights are rounded to few bits, one that lies between two codes may be rounded to either."""
    random = Random(seed)
    source, target, choices = drawn(random)
    is_exact = choices["optimizer"] in EXACT and choices["precision"] == "fp32"
    band, batch_size = 1e-12 if is_exact else 1e-3, random.randint(12, 17)
    (wanted,) = trained(ALONE, WIDE, choices, [Leg(tmp_path / "wanted", batch_size)])
    leg = Leg(tmp_path / "found", batch_size, stop_at=K, sharded_above_gib=random.choice([None, 0.0]))
    first = trained(source, WIDE, choices, [leg])[0]
    second = trained(target, WIDE, choices, [leg._replace(stop_at=None, is_resumed=True)])[0]
    assert [*first, *second] == near(wanted, band), f"{source} to {target} with {choices}"
