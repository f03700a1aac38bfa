"""Any option on several ranks: a run that stops and goes on has the losses of one that doesn't stop, to the bit on the
same ranks, and to 1e-12 in fp64 on others. Or the option is refused in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import torch

from lowvram.config.errors import BadInput, Incompatible
from lowvram.core.device import absent_facts
from lowvram.core.knob import Exactness, conflicts
from lowvram.models.resnet import NormKind
from lowvram.tasks import Auto, Problem
from tests.laboratory import (
    CPU,
    IMAGES,
    KNOBS,
    NEUTRAL,
    OPTIONS,
    RESNET,
    compiler_as_before,
    knobs_of,
    lacking_of,
)
from tests.loops.test_elastic import POINTS, ROUNDING, WIDE, Choices, Double, K, Leg, Losses, Point, near
from tests.ranks import on_ranks
from tests.tiers import first_of

pytestmark = pytest.mark.medium

DAY = 20261128
IN_IMAGES: Any = Double(Auto().pose(replace(RESNET, norm=NormKind.group), IMAGES))
Pair = tuple[str, str]  # a group and one of its options
Found = list[Losses] | str  # the losses of some legs, or the sentence with which the first of them is refused


class Way(NamedTuple):
    """What is trained, with which knobs, and the folder of its runs."""

    folder: Path
    task: Problem
    choices: Choices
    batch_size: int = 12
    sharded_above_gib: float | None = None

    def leg(self, name: str, **about: Any) -> Leg:
        return Leg(self.folder / name, self.batch_size, sharded_above_gib=self.sharded_above_gib, **about)

    def train(self, *legs: Leg) -> Found:
        try:
            return [leg.train(self.task, self.choices) for leg in legs]
        except (Incompatible, BadInput) as error:
            return str(error)
        except Exception as error:
            error.add_note(f"with {self.choices}")
            raise


def begin(ways: list[Way]) -> list[Found]:
    """Train each way twice: without a stop, and until a stop. A rank compiles without inductor, which takes minutes."""
    with compiler_as_before(), torch.compiler.set_stance("default", force_backend="aot_eager"):
        return [way.train(way.leg("wanted"), way.leg("found", stop_at=K)) for way in ways]


def go_on(ways: list[Way]) -> list[Found]:
    """Train what each way has left after its stop."""
    with compiler_as_before(), torch.compiler.set_stance("default", force_backend="aot_eager"):
        return [way.train(way.leg("found", is_resumed=True)) for way in ways]


def at(point: Point, work: Callable[[list[Way]], list[Found]], ways: list[Way]) -> list[Found]:
    """What all ranks of a point find, which is the same on each."""
    ways = [way._replace(choices={**way.choices, **point.choices()}) for way in ways]
    of_ranks = on_ranks(work, ways, num_ranks=point.num_ranks)
    assert all(found == of_ranks[0] for found in of_ranks)
    return of_ranks[0]


def check(source: Point, target: Point, ways: list[Way], band: float = 0.0) -> list[str]:
    """That each way that isn't refused goes on at the target with the losses that it has without a stop at the source:
    within the band, but to the bit if both are one point. Returns the refusals."""
    band = 0.0 if source == target else band
    begun = list(zip(ways, at(source, begin, ways), strict=True))
    trained = [(way, *losses) for way, losses in begun if not isinstance(losses, str)]
    rests = at(target, go_on, [way for way, *_ in trained]) if trained else []
    ended = list(zip(trained, rests, strict=True))
    for (way, wanted, first), rest in ended:
        assert [step for step, _ in wanted] == [1, 2, 3, 4, 4], way.choices
        assert first == wanted[:K], way.choices
        assert isinstance(rest, str) or rest == [near(wanted[K:], band)], way.choices
    refused = [*begun, *((way, rest) for (way, *_), rest in ended)]
    sentences = [f"{way.choices}: {why}" for way, why in refused if isinstance(why, str)]
    assert not any("\n" in sentence for sentence in sentences), sentences
    return sentences


# Each option of a group, on the same ranks

GROUPS = [group for group in OPTIONS if group != "sharding"]  # whose options the points are


def cases() -> list[tuple[Point, str]]:
    """All groups on two ranks, and some on more or with weights on the hosts. The first case is a quick one."""
    random = Random(DAY)
    shardings = ("zero1", "fsdp", "ddp", "stages")
    found = [(Point(sharding, 2), group) for sharding in shardings for group in GROUPS]
    others = [*(Point(sharding, 3) for sharding in shardings[:3]), Point("hsdp", 4), Point("hosts", 2)]
    found += [(point, group) for point in others for group in random.sample(GROUPS, 4) if group not in point.choices()]
    return sorted(found, key=lambda case: case != (Point("zero1", 2), "norms"))


def fewest_samples(*options: Pair, num_ranks: int) -> int:
    """Of a batch of which each rank has a sample for each part."""
    return num_ranks * max(KNOBS[option].num_parts() for option in options)


@pytest.mark.parametrize(("point", "group"), first_of(cases()), ids=str)
def test_each_option_goes_on_to_the_bit_or_is_refused(tmp_path: Path, point: Point, group: str) -> None:
    ways = [
        Way(
            tmp_path / option,
            WIDE,
            {group: option},
            max(12, fewest_samples((group, option), num_ranks=point.num_ranks)),
        )
        for option in OPTIONS[group]
        if option != NEUTRAL[group]
    ]
    for refusal in check(point, point, ways):
        print(f"refused: {refusal}")


# Pairs of options, and other ranks

BAND, BAND_OF_ROUNDED = 1e-12, 1e-2  # of losses, relative


def is_rounded(option: Pair) -> bool:
    """Whether it rounds to few bits, or computes in 16: a number that lies between two codes may become either."""
    group, name = option
    is_of_few_bits = group == "optimizer" and (name in ROUNDING or KNOBS[option].exactness is Exactness.LOSSY)
    return is_of_few_bits or group in ("activations", "qat", "precision")


class Move(NamedTuple):
    """A run with two options, from some ranks to others."""

    source: Point
    target: Point
    task: Problem
    options: tuple[Pair, Pair]

    @property
    def band(self) -> float:
        return BAND_OF_ROUNDED if any(map(is_rounded, self.options)) else BAND

    def is_allowed_at(self, point: Point) -> bool:
        """As far as facts of the machine, the model and the other options tell."""
        knobs = knobs_of(**{**dict(self.options), **point.choices()})
        return not conflicts(knobs, absent_facts(CPU, point.num_ranks), lacking_of(self.task, *knobs.values()))


def drawn(random: Random) -> Move:
    """Two options that are allowed at both of two points. Few of those that are drawn at first are."""
    while True:
        source, target = random.choice(POINTS), random.choice(POINTS)
        one, other = (
            (group, random.choice([option for option in OPTIONS[group] if option != NEUTRAL[group]]))
            for group in random.sample(GROUPS, 2)
        )
        move = Move(source, target, random.choice([WIDE, IN_IMAGES]), (one, other))
        if move.is_allowed_at(source) and move.is_allowed_at(target):
            return move


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(DAY, DAY + 30))
def test_two_options_go_on_with_any_sharding_on_any_number_of_ranks(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    move = drawn(random)
    most_ranks = max(move.source.num_ranks, move.target.num_ranks)
    batch_size = max(random.randint(12, 17), fewest_samples(*move.options, num_ranks=most_ranks))
    way = Way(tmp_path, move.task, dict(move.options), batch_size, random.choice([None, 0.0]))
    for refusal in check(move.source, move.target, [way], move.band):
        print(f"refused: {refusal}")
