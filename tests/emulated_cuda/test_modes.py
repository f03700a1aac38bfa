"""What a user does with a card, on the emulated device: train, stop and go on, export, plan, search, limit its memory,
look where the memory goes. Each in ordinary child processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lowvram.loops.export.folder import load
from lowvram.results.row import Row
from tests.calls import ROOT, TINY, TINY_RESNET, Outcome, history, read_row
from tests.cli.test_resume import STEPS
from tests.laboratory import IS_EMULATED, relative_error

Call = Callable[..., Outcome]
pytestmark = [pytest.mark.emulated, pytest.mark.skipif(not IS_EMULATED, reason="not the emulated device")]
CUDA = "device=cuda"
MEASURED = ("mode=measure", "measure.warmup_steps=1", "measure.steps=2")
LARGE = (*TINY, "train.batch_size=128", "data.sequence_length=64", CUDA)
CONTEXT_MIB, MIB = int(os.environ.get("EMULATED_CONTEXT_MIB", 0)), 2**20  # the context of the emulated device
SAME = 1e-5  # relative, after seven steps of AdamW in fp32

TRAINED = {
    "transformer": (*TINY, "accum=x2", "stepping=in_backward", "stepping.clip=0.5"),
    "offloaded": (*TINY, "offload=activations", "stepping=cpu_offload", "loader=workers"),
    "resnet": (*TINY_RESNET, "ckpt=every1"),
}


@pytest.mark.parametrize("case", TRAINED)
def test_a_killed_run_goes_on_and_its_weights_are_the_cpus(call: Call, tmp_path: Path, case: str) -> None:
    words = (*TRAINED[case], *STEPS)
    folders = {name: tmp_path / "outputs" / name for name in ("cpu", "whole", "killed")}
    assert call(*words, "device=cpu", "hydra.run.dir=outputs/cpu").code == 0
    whole = call(*words, CUDA, "hydra.run.dir=outputs/whole")
    assert whole.code == 0, whole.said()
    killed = call(*words, CUDA, "hydra.run.dir=outputs/killed", "name=kill@6")
    assert killed.row["status"] == "killed"
    resumed = call("resume=last", "name=null")
    assert resumed.code == 0, resumed.said()
    assert "step_00000004" in resumed.out
    assert history(folders["killed"]) == history(folders["whole"])

    weights = {name: load(folder / "model").state_dict() for name, folder in folders.items()}
    assert relative_error(weights["killed"], weights["whole"]) == 0
    assert relative_error(weights["whole"], weights["cpu"]) <= SAME
    on_card, on_cpu = (read_row(folders[name])["loss"] for name in ("whole", "cpu"))
    assert on_card == pytest.approx(on_cpu, rel=SAME)


@pytest.mark.parametrize("words", [TINY, TINY_RESNET], ids=["transformer", "resnet"])
def test_a_plan_is_what_is_measured(call: Call, words: tuple[str, ...]) -> None:
    planned = call(*words, CUDA, "mode=plan", "hydra.run.dir=planned")
    assert planned.code == 0, planned.said()
    plan = planned.row["plan"]
    assert plan["device"] == torch.cuda.get_device_name()
    measured = call(*words, CUDA, *MEASURED, "hydra.run.dir=measured")
    assert measured.code == 0, measured.said()
    memory = measured.row["memory"]
    assert plan["allocated_bytes"] == pytest.approx(memory["peak_bytes"], rel=0.01)
    assert plan["reserved_bytes"] == pytest.approx(memory["reserved_bytes"], rel=0.05)


def test_a_search_ends_with_what_runs_within_the_budget(call: Call) -> None:
    words = ("mode=search", "search.groups=[ckpt,accum]", "search.probes=2", "measure.max_seconds=0.5")
    outcome = call(*LARGE, *words, f"vram={CONTEXT_MIB + 150}MiB")
    assert outcome.code == 0, outcome.said()
    rows = [read_row(path.parent) for path in outcome.cwd.glob("outputs/**/result.json")]
    assert {row["status"] for row in rows} == {"ok"}
    assert "the fastest: " in outcome.out


def reserved_bytes(row: Row) -> int:
    assert row["status"] == "ok"
    return row["memory"]["reserved_bytes"]


def test_what_does_not_fit_into_vram_is_out_of_memory_and_auto_finds_parts_that_do(call: Call) -> None:
    """The limit is real: torch's allocator raises."""
    free = call(*LARGE, *MEASURED, "hydra.run.dir=free").row
    limit_mib = CONTEXT_MIB + int(0.7 * reserved_bytes(free)) // MIB
    vram = f"vram={limit_mib}MiB"
    refused = call(*LARGE, *MEASURED, vram, "hydra.run.dir=refused").row
    assert refused["status"] == "oom"
    grown = call(*LARGE, *MEASURED, vram, "accum=auto", "hydra.run.dir=grown").row
    assert grown["status"] == "ok"
    assert grown["config"]["accum"]["parts"] > 1
    assert [attempt["status"] for attempt in grown["attempts"]] == ["oom"] * len(grown["attempts"])
    assert grown["attempts"][0]["parts"] == 1
    assert CONTEXT_MIB + reserved_bytes(grown) / MIB <= limit_mib
    assert grown["loss"] == pytest.approx(free["loss"], rel=SAME)


def test_the_readmes_limit_holds_on_any_card(call: Call) -> None:
    row = call(*TINY, CUDA, *MEASURED, "vram=8GiB").row
    assert (row["status"], row["config"]["vram"]) == ("ok", "8GiB")


def test_where_the_memory_goes_is_left_in_the_folder(call: Call) -> None:
    outcome = call(*TINY, CUDA, "debug=memory")
    assert outcome.code == 0, outcome.said()
    assert {"memory.md", "snapshot.pickle", "snapshot.html"} <= {path.name for path in outcome.folder.iterdir()}


def test_fidelity_is_that_of_the_cpu(call: Call) -> None:
    words = (*TINY, *MEASURED, "measure.fidelity=true", "measure.fidelity_steps=2", "precision=bf16")
    errors = {}
    for device in ("cuda", "cpu"):
        outcome = call(*words, f"device={device}", f"hydra.run.dir={device}")
        assert outcome.code == 0, outcome.said()
        errors[device] = outcome.row["fidelity"]["gradient_error"]
    assert errors["cuda"] == pytest.approx(errors["cpu"], rel=0.2)


def test_the_check_of_a_card_runs_to_its_end(tmp_path: Path) -> None:
    """scripts/gpu_check with small models. Its tests and traces have their own tests; its plans take long."""
    small = {"PARTS": "points knobs loss search", "MODELS": "transformer,resnet", "KNOBS": "logits"}
    words = ["train.batch_size=2", "measure.max_seconds=1", "measure.reruns=0"]
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "gpu_check"), str(tmp_path / "check"), *words],
        env={**os.environ, **small, "LOWVRAM_PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
