"""The planner: rows of plans from checked configurations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

from lowvram.config.compose import chosen, plain
from lowvram.config.defaults import CONF
from lowvram.config.errors import Incompatible
from lowvram.config.identity import register_resolvers
from lowvram.config.settings import Settings, settings
from lowvram.core import rounding
from lowvram.core.assemble import assemble
from lowvram.core.fact import Fact
from lowvram.loops.noise_scale import noise_of
from lowvram.loops.setup import can_replace
from lowvram.planning.cache import TraceCache
from lowvram.planning.memory.context import context_bytes
from lowvram.planning.memory.overheads import OBJECTS, PAGES, SCRATCH, onednn_overheads
from lowvram.planning.worker import Fields, Planner
from lowvram.results.planned import plan_lines
from lowvram.worker import job
from tests.calls import TINY, TINY_RESNET

pytestmark = pytest.mark.medium

MIB = 2**20
CARD = "plan.device=rtx3060"


def composed(*words: str) -> tuple[Settings, dict[str, str]]:
    """A configuration as the command line makes it."""
    register_resolvers()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", ["mode=plan", *words], return_hydra_config=True)
    return settings(plain(config)), chosen(config.hydra.runtime.choices)


def planned(*words: str, planner: Planner | None = None) -> Fields:
    fields = (planner or Planner()).fields(*composed(*words))
    assert fields["status"] == "ok", fields
    return fields["plan"]


@pytest.fixture
def libraries_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever torch runs here: what later versions' libraries take isn't known, and counts nothing."""
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")


def test_weights_on_their_way_to_the_host_have_been_on_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32, and rounded: FSDP's whole, others some rows at a time."""
    monkeypatch.setattr(rounding, "NUMEL_AT_A_TIME", 2**14)
    words = (*TINY, CARD, "precision=bf16_pure", "model.vocab_size=20000", "model.tied_embeddings=true")
    phases = [planned(*words, away)["by_phase"]["build"] for away in ("offload=parameters", "weights=stream")]
    embedding = 20000 * 32
    assert phases[0] >= 6 * embedding
    assert 4 * embedding < phases[1] < 5 * embedding


@pytest.mark.usefixtures("libraries_known")
@pytest.mark.parametrize("words", [TINY, TINY_RESNET], ids=["transformer", "resnet"])
def test_what_is_asked_of_a_card_is_its_tensors_and_its_libraries(words: tuple[str, ...]) -> None:
    plan = planned(*words, CARD)
    lines = {line["name"]: line["bytes"] or 0 for line in plan["lines"]}
    context = lines.pop("CUDA context")  # no part of the allocator, but of what `vram` counts
    assert plan["least_vram_bytes"] > plan["allocated_bytes"] + context > context > 0
    libraries = sum(lines.values())
    assert libraries > 8 * MIB  # a workspace for the forward pass, one for the backward pass
    tensors = sum(num_bytes for kind, num_bytes in plan["by_kind"].items() if kind != "host")
    assert plan["allocated_bytes"] == tensors + libraries
    assert plan["allocated_bytes"] <= plan["reserved_bytes"]
    assert max(plan["by_phase"].values()) == tensors
    assert plan["largest"][0]["bytes"] >= plan["largest"][1]["bytes"]
    assert "counted with its most: CUDA context, 0.104 GiB to 0.196 GiB" in plan_lines(plan)


def test_a_budget_bounds_what_is_reserved() -> None:
    """The allocator gives free segments back before it runs out."""
    words = ("model=resnet", "data=synthetic", "data.image_size=64", "train.batch_size=512", CARD)
    free = planned(*words)
    room = free["least_vram_bytes"] + 2 * MIB
    assert free["reserved_bytes"] > room - context_bytes(28)[1]
    tight = planned(*words, f"vram={room / MIB}MiB")
    assert tight["allocated_bytes"] <= tight["reserved_bytes"] <= room - context_bytes(28)[1]
    assert tight["least_vram_bytes"] == free["least_vram_bytes"]


@pytest.mark.usefixtures("libraries_known")
def test_a_cpu_is_planned_as_its_ledger_counts() -> None:
    plan = planned(*TINY, "plan.device=cpu")
    assert plan["reserved_bytes"] is None
    assert plan["allocated_bytes"] == sum(plan["by_kind"].values())
    least, libraries = plan["least_vram_bytes"], {line["name"]: line["bytes"] or 0 for line in plan["lines"]}
    assert least >= plan["allocated_bytes"] + libraries[OBJECTS]  # the build's own peak may be higher
    resident = least - libraries[SCRATCH] + libraries[PAGES]  # of which the cap leaves out the last
    assert plan["process_bytes"] == resident
    assert plan["fits"] is None  # nobody has named a budget
    resnet = planned("model=resnet", "data=synthetic", "train.batch_size=4", "plan.device=cpu")
    convolving = [line.name for line in onednn_overheads(1, False, "2.13.0+cpu")]
    assert [line["name"] for line in resnet["lines"]] == [*convolving, *libraries]
    assert planned(*TINY, "device=cpu")["device"] == "cpu"


def test_a_price_is_that_of_a_direct_trace() -> None:
    """The third batch size lies between two that were traced."""
    planner = Planner()
    for batch_size in (4, 32):
        planned(*TINY, CARD, f"train.batch_size={batch_size}", planner=planner)
    (scaler,) = planner.scalers.values()
    num_traces = sum(len(known.traces) for known in scaler.known.values())
    scaled = planned(*TINY, CARD, "train.batch_size=16", planner=planner)
    assert sum(len(known.traces) for known in scaler.known.values()) == num_traces
    assert scaled == planned(*TINY, CARD, "train.batch_size=16")


def test_a_recurrent_model_keeps_more_than_is_known() -> None:
    words = ("model=external", "model.target=tests.yours.Recurrent", "model.args={vocab_size: 16}")
    words += ("model.reads=TOKENS", "data=synthetic", "data.vocab_size=16", "data.sequence_length=8")
    for device in (CARD, "plan.device=cpu"):
        names = [line["name"] for line in planned(*words, device)["lines"] if line["bytes"] is None]
        assert any("recurrent layers" in name for name in names)
    assert not any("recurrent" in line["name"] for line in planned(*TINY, CARD)["lines"])


def test_margin_and_budget_decide_what_fits() -> None:
    least = planned(*TINY, CARD)["least_vram_bytes"] / MIB
    assert planned(*TINY, CARD, "plan.margin=0", f"vram={least}MiB")["fits"] is True
    assert planned(*TINY, CARD, "plan.margin=0.1", f"vram={least}MiB")["fits"] is False
    assert planned(*TINY, CARD, "plan.margin=0.1", f"vram={least * 1.11}MiB")["fits"] is True
    assert planned(*TINY, CARD)["budget_bytes"] > 10_000 * MIB  # the card's own


@pytest.mark.usefixtures("libraries_known")
def test_the_margin_of_a_cpu_is_that_of_each_line() -> None:
    """Beside few tensors it is a large share, beside many a small one."""
    plans = [planned(*TINY, "plan.device=cpu", f"train.batch_size={size}", "vram=1GiB") for size in (4, 4000)]
    for plan in plans:
        tensors = plan["least_vram_bytes"] - 6 * MIB  # Python objects and scratch memory
        assert plan["margin_bytes"] == pytest.approx(5 * MIB + 0.01 * tensors, rel=1e-3)
        assert plan["margin"] == plan["margin_bytes"] / plan["least_vram_bytes"]
    few, many = plans
    assert few["margin"] > 0.5 > 0.1 > many["margin"]
    assert planned(*TINY, "plan.device=cpu", "plan.margin=0.2", "vram=1GiB")["margin"] == 0.2


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("libraries_known")
@pytest.mark.parametrize("words", [["precision=bf16"], ["optimizer=muon"], []])
def test_products_in_16_bits_have_a_line_on_a_cpu(words: list[str]) -> None:
    names = [line["name"] for line in planned(*TINY, "plan.device=cpu", *words)["lines"]]
    assert any("16 bits" in name for name in names) is bool(words)


def test_the_margin_is_the_error_that_is_known_of_plans(tmp_path: Path) -> None:
    """And a tenth where none is."""
    assert planned(*TINY, CARD)["margin"] == 0.1
    assert planned(*TINY, CARD)["error"] is None
    known = {"median": 0.02, "p95": 0.3, "where": "12 points on a card"}
    text = (CONF / "data_sheets" / "rtx3060.yaml").read_text()
    mine = tmp_path / "mine.yaml"
    lines = [line for line in text.splitlines() if not line.startswith("error_")]
    mine.write_text("\n".join([*lines, *(f"error_{name}: {value}" for name, value in known.items())]))
    plan = planned(*TINY, f"plan.device={mine}", "vram=1GiB")
    assert plan["error"] == known
    assert plan["margin"] == 0.3
    assert "plans were off by 2.0% (median) and 30.0% (p95): 12 points on a card" in plan_lines(plan)
    assert planned(*TINY, f"plan.device={mine}", "plan.margin=0.2")["margin"] == 0.2
    half = tmp_path / "half.yaml"
    half.write_text("\n".join([*lines, "error_median: 0.1", "error_p95: null", "error_where: null"]))
    fields = Planner().fields(*composed(*TINY, f"plan.device={half}"))
    assert "known with error_p95 and error_where" in fields["reason"]


def test_host_memory_is_named_where_a_knob_takes_it() -> None:
    """With a card the batch is there, too; what a CPU holds isn't counted twice."""
    offload, batch_bytes = ("offload=activations", "offload.min_bytes=1"), planned(*TINY, CARD)["host_bytes"]
    assert 0 < batch_bytes < planned(*TINY, CARD, *offload)["host_bytes"]
    assert planned(*TINY, "plan.device=cpu")["host_bytes"] is None


def test_expandable_segments_are_replayed_as_such() -> None:
    words = (*TINY, CARD, "model.width=512", "data.sequence_length=100", "train.batch_size=32")
    assert planned(*words)["reserved_bytes"] != planned(*words, "allocator=expandable")["reserved_bytes"]


def test_compiled_points_say_how_they_were_planned() -> None:
    assert planned(*TINY, CARD, "compile=blocks")["is_eager_equivalent"] is True
    assert planned(*TINY, CARD)["is_eager_equivalent"] is False


def test_what_does_not_go_together_is_incompatible() -> None:
    fields = Planner().fields(*composed(*TINY, CARD, "optimizer=adafactor", "offload=parameters"))
    assert fields["status"] == "incompatible"
    assert "optimizer=adafactor needs that the optimizer updates whole parameters" in fields["reason"]
    fields = Planner().fields(*composed(*TINY, CARD, "accum=x8"))
    assert "train.batch_size=4: must be at least accum.parts=8, a sample for each part" in fields["reason"]


def test_a_model_that_cannot_be_planned_is_an_error_and_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, choices = composed(*TINY, CARD)
    task = whole.groups["task"].pose

    def looking(model: object, spec: object) -> object:
        problem = task(model, spec)
        criterion = problem.criterion
        problem.criterion = lambda outputs, part: criterion(outputs, part) * float(outputs.sum() > 0)
        return problem

    class Looks:
        pose = staticmethod(looking)

    fields = Planner().fields(replace(whole, groups={**whole.groups, "task": Looks()}), choices)
    assert fields["status"] == "error"
    assert fields["reason"].startswith("can't plan this model: ")
    assert fields["advice"] == "try ckpt=every1 or accum=x4"
    assert "depends on the values of a tensor" in fields["reason"]
    assert "plan" not in fields


def test_traces_on_disk_are_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (*TINY, CARD)
    first = planned(*words, planner=Planner(TraceCache(tmp_path)))
    assert list(tmp_path.iterdir())

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("traced again")

    monkeypatch.setattr("lowvram.planning.scaling.trace", refuse)
    assert planned(*words, planner=Planner(TraceCache(tmp_path))) == first


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "words",
    [
        ["stepping=in_backward"],
        ["stepping=in_backward", "stepping.sums=int8"],
        ["stepping=cpu_offload"],
        ["stepping=zeroth_order"],
        ["offload=parameters"],
        ["sharding=fsdp", "sharding.ranks=2"],
        ["sharding=fsdp"],  # for two reasons
    ],
    ids=" ".join,
)
def test_what_has_no_noise_scale_is_refused_by_a_plan_as_by_a_run(words: list[str]) -> None:
    whole, choices = composed(*TINY, "device=cpu", "accum=x2", "train.noise_scale=true", *words)
    knobs = {**job.named_knobs(whole, choices, torch.device("cpu"))[1], **noise_of(whole.train).knobs()}
    several = {} if "sharding.ranks=2" not in words else {Fact.ONE_RANK: "there are two"}
    problem = Planner().problem(whole)
    with pytest.raises(Incompatible) as refused:
        assemble(problem, knobs, torch.device("cpu"), absent=several or None)
    fields = Planner().fields(whole, choices)
    assert fields["status"] == "incompatible"
    assert "train.noise_scale=true needs that " in fields["reason"]
    assert fields["reason"] == str(refused.value)


def test_the_noise_scale_takes_nothing_that_a_plan_counts(tmp_path: Path) -> None:
    """And traces are those of runs without it."""
    words = (*TINY, CARD, "accum=x2")
    measured, planner = composed(*words, "train.noise_scale=true"), Planner(TraceCache(tmp_path))
    first = planned(*words, planner=planner)
    num_traces = len(list(tmp_path.iterdir()))
    advice = {"advice": first["advice"].replace("stepping=cpu_offload", "ckpt=every1")}  # that is left of it
    assert planner.fields(*measured)["plan"] == first | advice
    assert Planner(TraceCache(tmp_path)).fields(*measured)["plan"] == first | advice
    assert len(list(tmp_path.iterdir())) == num_traces


def test_advice_offers_nothing_that_the_noise_scale_rules_out() -> None:
    for is_measured in (False, True):
        whole, choices = composed(*TINY, f"train.noise_scale={is_measured}")
        can_be = can_replace(whole, choices, {}, num_ranks=1)
        assert can_be("stepping", "in_backward") is not is_measured
        assert can_be("ckpt", "every1")
