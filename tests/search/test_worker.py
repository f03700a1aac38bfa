"""A search finds what planning everything would find, with far fewer plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from lowvram.config.errors import BadInput, Incompatible
from lowvram.config.settings import Settings
from lowvram.planning.estimate import Fields, PlanDevice
from lowvram.planning.trace.fake import CantPlan
from lowvram.planning.worker import Planner, plan_device_of
from lowvram.results.row import MIB
from lowvram.search.exploring import explore
from lowvram.search.plan_cache import PlanCache, fits_barely
from lowvram.search.ranking import ranked
from lowvram.search.space import Estimate, Plan
from lowvram.search.worker import (
    measured_first,
    nothing_fits,
    offered,
    search,
    usual_groups,
)
from tests.calls import TINY, TINY_RESNET
from tests.planning.test_worker import composed

pytestmark = pytest.mark.medium

CARD = "plan.device=rtx3060"
WORDS = (*TINY, CARD, "train.batch_size=64", "model.num_layers=3")
GROUPS = "search.groups=[ckpt,accum,stepping,logits]"
PLANNER = Planner()  # traces of one test serve the others


def book(*words: str, tell: Callable[[int], None] = lambda num_plans: None, is_measured: bool = False) -> PlanCache:
    whole, choices = composed(*WORDS, *words)
    return PlanCache(PLANNER, whole, choices, plan_device_of(whole), tell, is_measured)


@pytest.fixture(scope="module")
def every_plan() -> list[Plan]:
    """Of all combinations of two groups."""
    whole = book("vram=1GiB", "search.groups=[ckpt,accum]")
    space, _ = offered(whole, ["ckpt", "accum"])
    return [whole.plan(space, options) for options in space.combinations()]


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.15, 0.4, 0.7])
def test_the_best_of_all_that_fit_is_found(every_plan: list[Plan], share: float) -> None:
    sizes = sorted(plan["least_vram_bytes"] for plan in every_plan)
    budget_bytes = 1.1001 * sizes[int(share * (len(sizes) - 1))]
    fitting = [plan for plan in every_plan if plan["least_vram_bytes"] * 1.1 <= budget_bytes]
    best_ms = min(plan["step_ms"] for plan in fitting)
    whole = book(f"vram={budget_bytes / 2**20}MiB", "search.groups=[ckpt,accum]")
    best = search(whole, [])["ranking"][0]
    assert best["fits"] is True
    assert best["step_ms"] == pytest.approx(best_ms, rel=1e-3)


LARGE = ("train.batch_size=1024", "data.sequence_length=64")  # 474 to 1102 MiB, by accum and ckpt


def vram_of(least_bytes: float) -> str:
    """A budget into which a plan of this size fits without its margin of 0.1, but not with it."""
    return f"vram={1.09 * least_bytes / MIB}MiB"


@pytest.mark.slow
def test_the_fastest_that_fits_only_without_its_margin_is_measured_first() -> None:
    words = (*LARGE, "search.groups=[accum]")
    every = search(book("vram=2GiB", *words), [])["ranking"]
    vram = vram_of(max(plan["least_vram_bytes"] for plan in every))  # of the options in use
    found = search(book(vram, *words, is_measured=True), [])
    first, *others = found["ranking"]
    assert (first["changes"], first["fits"]) == ({}, False)
    assert [plan["fits"] for plan in others] == [True] * (len(every) - 1)
    assert found["refusal"] is None
    named = "fits only without its margin, so a probe decides: the options in use ("
    assert [line.startswith(named) for line in found["account"]].count(True) == 1
    assert not any(line.startswith("too large") for line in found["account"])
    assert search(book(vram, *words), [])["ranking"] == others  # which nothing measures
    typed = search(book(vram, *words, "plan.margin=0.1", is_measured=True), [])["ranking"]
    assert [plan["changes"] for plan in typed] == [plan["changes"] for plan in others]


def test_of_combinations_that_fit_only_without_their_margin_the_fastest_is_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    figures = {"none": (8.0, 300), "x2": (9.0, 95), "x4": (9.5, 90), "x8": (10.0, 50)}  # step_ms, bytes

    def planned_so(self: Planner, settings: Settings, choices: Mapping[str, str], plan_device: PlanDevice) -> Fields:
        step_ms, least_bytes = figures[choices["accum"]]
        return {"plan": {**planned(step_ms, least_bytes), "margin": 0.5, "fits": 1.5 * least_bytes <= 100}}

    monkeypatch.setattr(Planner, "planned", planned_so)
    for is_measured, names in ((True, ["none", "x2", "x8"]), (False, ["none", "x8"])):
        cache = book("vram=100MiB", is_measured=is_measured)
        space, _ = offered(cache, ["accum"])
        estimates = [Estimate({"accum": name}, 1, *figure) for name, figure in figures.items()]
        explore(cache, space, estimates, num_wanted=3)
        assert [name for (name,) in cache.plans] == names


@pytest.mark.slow
def test_where_nothing_fits_with_its_margin_the_two_of_least_memory_are_measured() -> None:
    words = (*LARGE, "search.groups=[accum]", "ckpt=every1")
    every = search(book("vram=2GiB", *words), [])["ranking"]
    least, second, *_ = sorted(every, key=lambda plan: plan["least_vram_bytes"])
    vram = vram_of(least["least_vram_bytes"])
    found = search(book(vram, *words, is_measured=True), [])
    assert [plan["changes"] for plan in found["ranking"]] == [least["changes"], second["changes"]]
    for refused in (book(vram, *words), book(vram, *words, "plan.margin=0.1", is_measured=True)):
        with pytest.raises(Incompatible, match="nothing fits: the smallest plan found fits into vram=") as said:
            search(refused, [])
        assert str(said.value) == found["refusal"]


def test_only_what_is_faster_than_all_that_fit_is_measured_without_its_margin() -> None:
    slow, fast = planned(10.0, 95, accum="x2"), planned(9.0, 96, accum="x4")
    fits = planned(10.0, 50, accum="x8")
    cache = book("vram=100MiB", is_measured=True)
    for plans, first in (((slow, fits), []), ((slow, fast, fits), [fast]), ((fast, slow), [slow, fast])):
        cache.plans = {tuple(plan["changes"].values()): plan for plan in plans}
        assert measured_first(cache) == first
        no_limit = replace(cache, settings=book(is_measured=True).settings)
        assert measured_first(no_limit) == []  # without `vram` a probe could take the whole machine's memory


def test_host_memory_that_nothing_limits_must_fit_with_its_margin() -> None:
    plan = {**planned(1.0, 95), "host_budget_bytes": 100}
    assert fits_barely(plan)
    assert fits_barely({**plan, "host_bytes": 90})
    assert not fits_barely({**plan, "host_bytes": 95})
    assert not fits_barely({**plan, "least_vram_bytes": 101})


def test_groups_that_say_what_is_learnt_or_that_no_plan_knows_are_searched_on_demand_alone() -> None:
    groups = set(usual_groups())
    assert groups >= {"allocator", "precision", "tile", "ckpt", "stepping", "logits", "offload", "accum"}
    assert groups.isdisjoint({"adapter", "compile", "sharding", "optimizer"})


def test_an_option_that_the_model_can_not_have_is_ruled_out() -> None:
    whole, choices = composed(*TINY_RESNET, CARD, "vram=1GiB", "search.groups=[tile,accum]")
    found = search(PlanCache(PLANNER, whole, choices, plan_device_of(whole), lambda num_plans: None, False), [])
    assert any("ruled out: tile=mlp: tile=mlp needs that the task knows the MLPs" in line for line in found["account"])
    assert found["ranking"]


def test_what_has_no_noise_scale_is_ruled_out_where_that_is_measured() -> None:
    found = search(book("vram=1GiB", "search.groups=[stepping,accum]", "train.noise_scale=true"), [])
    why = "train.noise_scale=true needs that every gradient is alive when the update runs, and stepping=in_backward"
    assert any(line.startswith(f"ruled out: stepping=in_backward: {why}") for line in found["account"])
    assert all("stepping" not in plan["changes"] for plan in found["ranking"])


def test_what_is_typed_stays() -> None:
    found = search(book("vram=1GiB", GROUPS, "ckpt=every1"), ["ckpt", "accum"])
    assert all(set(plan["changes"]) <= {"stepping", "logits"} for plan in found["ranking"])


@pytest.mark.slow
def test_lossy_options_are_tried_on_demand_alone() -> None:
    words = ("vram=1GiB", "search.groups=[precision]")
    account = search(book(*words), [])["account"]
    assert any(line.startswith("ruled out: precision=bf16_pure") and "search.lossy=true" in line for line in account)
    found = search(book(*words, "search.lossy=true"), [])
    assert any(plan["changes"] == {"precision": "bf16_pure"} for plan in found["ranking"])


def test_an_option_that_decides_what_is_learnt_is_not_tried() -> None:
    """Two forward passes are cheaper than any other step, and learn far less."""
    account = search(book("vram=1GiB", "search.groups=[stepping]", "search.lossy=true"), [])["account"]
    assert any(line.startswith("ruled out: stepping=zeroth_order") and "what is learnt" in line for line in account)


@pytest.mark.slow
def test_a_budget_that_nothing_fits_says_the_least_that_would() -> None:
    with pytest.raises(
        Incompatible, match=r"vram=1.00 MiB: nothing fits: the smallest plan found fits into vram=\d+MiB .*: .*="
    ) as said:
        search(book("vram=1MiB", GROUPS), [])
    assert "\n" not in str(said.value)


def test_the_named_budget_is_enough() -> None:
    plan = {"changes": {}, "least_vram_bytes": 15 * MIB, "budget_bytes": MIB, "margin": 0.1}  # 16.5 MiB
    assert "fits into vram=17MiB (" in nothing_fits([plan | {"host_bytes": None, "host_budget_bytes": None}])


def test_without_a_budget_or_rates_there_is_nothing_to_search_by() -> None:
    with pytest.raises(BadInput, match="vram=null: must be a budget"):
        search(book("plan.device=generic"), [])
    with pytest.raises(BadInput, match=r"plan\.device='generic': must be a device whose YAML gives its rates"):
        search(book("plan.device=generic", "vram=1GiB"), [])


def test_what_was_changed_of_an_option_holds_for_the_others_or_rules_them_out() -> None:
    found = book("vram=1GiB", "search.groups=[stepping,accum]", "stepping.clip=0.5", "accum=x2", "accum.parts=8")
    space, refused = offered(found, ["stepping", "accum"])
    assert {knob.clip for (group, _), knob in space.knobs.items() if group == "stepping"} == {0.5}  # pyright: ignore[reportAttributeAccessIssue]
    assert {knob.parts for (group, _), knob in space.knobs.items() if group == "accum"} == {8}  # pyright: ignore[reportAttributeAccessIssue]
    assert refused["accum", "none"].startswith("accum.parts=8: must be 1 with accum=none")


@pytest.mark.slow
def test_host_memory_is_capped_as_well() -> None:
    words = ("vram=4GiB", "search.groups=[offload]", "model.width=128", "data.sequence_length=128")
    assert all(plan["fits"] for plan in search(book(*words), [])["ranking"])
    capped = book(*words, "plan.host=256KiB")  # has room for the batch, but for no activations
    search(capped, [])
    away = [plan for plan in capped.plans.values() if plan["host_bytes"] > 2**18]
    assert away
    assert not any(plan["fits"] for plan in away)


def without_plans_of(cant: set[str]) -> Callable[..., Fields]:
    """A `Planner.planned` that can't plan points with these options."""
    planned_whole = Planner.planned

    def planned(self: Planner, settings: Settings, choices: Mapping[str, str], plan_device: PlanDevice) -> Fields:
        if cant <= set(choices.values()):
            raise CantPlan("can't plan this model: somewhere")
        return planned_whole(self, settings, choices, plan_device)

    return planned


def test_an_option_that_cannot_be_planned_is_ruled_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planner, "planned", without_plans_of({"every1"}))
    told = search(book("vram=1GiB", "search.groups=[ckpt]"), [])
    assert told["ranking"]
    assert "ruled out: ckpt=every1: can't plan this model: somewhere" in told["account"]


@pytest.mark.slow
def test_a_combination_that_cannot_be_planned_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leanest of all, which is looked at where nothing fits."""
    found = book("vram=1MiB", "search.groups=[ckpt,accum]")
    monkeypatch.setattr(Planner, "planned", without_plans_of({"every1", "x32"}))
    with pytest.raises(Incompatible, match="nothing fits: the smallest plan found fits into"):
        search(found, [])
    assert ("every1", "x16") in found.plans


def test_progress_is_reported_plan_by_plan() -> None:
    told: list[int] = []
    found = book("vram=1GiB", "search.groups=[ckpt]", tell=told.append)
    search(found, [])
    assert told == list(range(1, len(found.plans) + 1))


def planned(step_ms: float, least_bytes: int = 1, **changes: str) -> Plan:
    """A plan for a budget of 100 bytes, with a margin of 10 %."""
    about = {"budget_bytes": 100, "host_budget_bytes": None, "host_bytes": None, "margin": 0.1}
    fits = 1.1 * least_bytes <= 100
    sizes = {"least_vram_bytes": least_bytes, "reserved_bytes": least_bytes}  # CUDA's context takes nothing
    return {**about, **sizes, "step_ms": step_ms, "changes": changes, "fits": fits}


def test_what_saves_what_nobody_asks_for_comes_last() -> None:
    bare, faster = planned(10.0), planned(8.0, precision="bf16")
    more, less = planned(9.0, precision="bf16", ckpt="every1"), planned(12.0, accum="x2")
    assert ranked([less, more, bare, faster]) == [faster, bare, more, less]


def test_of_equals_the_one_with_fewer_changes_comes_first() -> None:
    one, two = planned(10.0, ckpt="every1"), planned(10.0, ckpt="every2", accum="x2")
    assert ranked([two, one]) == [one, two]
