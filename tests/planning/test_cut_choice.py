"""sharding.cut_to_fit: a plan cuts a pipeline where its stages fit, at the least cost of time; the row says where."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lowvram.planning.choice import MOST_CUTS, About, Attempt, choose_cut
from lowvram.planning.worker import Planner
from tests.calls import TINY, Outcome
from tests.knobs.test_cut import Cut, every_cut
from tests.planning.test_worker import MIB, composed, planned

pytestmark = pytest.mark.medium

Call = Callable[..., Outcome]


def of_stage(num_bytes: float) -> Any:
    """A trace that says nothing but this."""
    return SimpleNamespace(sums=lambda: SimpleNamespace(peak_bytes=num_bytes))


@pytest.mark.parametrize("seed", range(40))
def test_stages_that_can_fit_do(seed: int) -> None:
    """Stages drawn at random, whose memory isn't quite linear in their blocks: some cut fits with a tenth to spare."""
    random = Random(seed)
    num_stages = random.randint(2, 5)
    num_blocks = random.randint(2 * num_stages, 32)
    held = [random.uniform(1.0, 3.0) for _ in range(num_stages)]
    base = [random.uniform(0, 20) * (stage in (0, num_stages - 1)) for stage in range(num_stages)]
    costs = [0.0, *[1.0] * num_blocks, random.uniform(0, 5)]

    def of(stage: int, number: int) -> float:
        return base[stage] + held[stage] * number + (number * 7 + stage) % 3 * 0.02

    tried = list[Cut]()

    def attempt(cut: Cut) -> Attempt:
        tried.append(cut)
        stages = [of(stage, number) for stage, number in enumerate(cut)]
        plan = {"least_vram_bytes": max(stages) + 5, "margin": 0.1, "budget_bytes": budget}
        return Attempt({"plan": plan}, [of_stage(each) for each in stages])

    def needed(cut: Cut) -> float:
        return 1.1 * (max(of(stage, number) for stage, number in enumerate(cut)) + 5)

    least = min(needed(cut) for cut in every_cut(num_blocks, num_stages))
    budget = 1.1 * least
    about = About(SimpleNamespace(costs=lambda known: costs), cast("Any", None), [], num_stages, cast("Any", None))
    found = choose_cut(about, attempt)["plan"]
    assert 1.1 * found["least_vram_bytes"] <= budget
    assert len({*tried}) == len(tried) <= MOST_CUTS


FIVE = (*TINY, "model.num_layers=5", "train.batch_size=32", "data.sequence_length=64", "devices=2")
FIVE = (*FIVE, "sharding=pipeline", "accum=x4", "plan.margin=0")
ON_CPU = (*FIVE, "plan.device=cpu")


def test_the_fastest_cut_is_taken_if_it_fits_and_else_a_smaller_one() -> None:
    planner = Planner()
    fastest = planned(*ON_CPU, planner=planner)
    words = (*ON_CPU, "sharding.cut_to_fit=true")
    whole = planned(*words, "vram=1GiB", planner=planner)
    assert whole["least_vram_bytes"] == fastest["least_vram_bytes"]
    cut = whole["chosen"]["sharding"]["cut"]
    assert sum(cut) == 5

    smaller = [planned(*ON_CPU, f"sharding.cut=[{number},{5 - number}]", planner=planner) for number in range(1, 5)]
    least = min(each["least_vram_bytes"] for each in smaller)
    assert least < fastest["least_vram_bytes"]
    found = planned(*words, f"vram={least / MIB}MiB", planner=planner)
    assert found["fits"]
    assert found["least_vram_bytes"] == least
    assert found["chosen"]["sharding"]["cut"] != cut
    assert not planned(*words, f"vram={(least - 512) / MIB}MiB", planner=planner)["fits"]


def test_a_cut_that_was_typed_is_not_chosen_again() -> None:
    assert "chosen" not in planned(*ON_CPU, "sharding.cut_to_fit=true", "sharding.cut=[2,3]", "vram=1MiB")


def test_what_cant_be_chosen_is_refused() -> None:
    reasons = {
        ("ckpt=auto",): "sharding.cut=null: must be given, as the plan chooses ckpt.blocks, and can't choose both",
        ("plan.device=cpu",): "vram=null: must be a budget, such as 8GiB, for a plan to choose sharding.cut",
        ("model.num_layers=3", "devices=4"): "sharding.pipeline=4: must be at most 3 stages in all",
    }
    for words, reason in reasons.items():
        fields = Planner().fields(*composed(*FIVE, "plan.device=rtx3060", "sharding.cut_to_fit=true", *words))
        assert fields["status"] == "incompatible"
        assert reason in fields["reason"]


@pytest.mark.slow
def test_a_run_is_cut_where_its_plan_says(call: Call) -> None:
    """The row names the numbers of blocks, and with them typed the same point runs again."""
    words = (*TINY, "model.num_layers=6", "data.sequence_length=64", "device=cpu", "sharding=pipeline")
    words = (*words, "sharding.ranks=2", "accum=x4", "sharding.cut_to_fit=true", "plan.margin=0", "debug=measure")
    outcome = call(*words, "vram=20MiB", "train.steps=2")
    assert outcome.code == 0, outcome.said()
    cut = outcome.row["config"]["sharding"]["cut"]
    word = f"sharding.cut={str(cut).replace(' ', '')}"
    assert f"sharding=pipeline: the plan has chosen {word}\n" in outcome.out
    typed = call(*words, word, "train.steps=2", "hydra.run.dir=outputs/typed")
    assert typed.code == 0, typed.said()
    assert typed.row["loss"] == outcome.row["loss"]
