"""debug=memory: the largest tensors add up to the ledger's peak, and each says where it was made."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.modules import module

from lowvram.core.assemble import assemble
from lowvram.core.kind import Kind
from lowvram.core.ledger import Peak, ledger
from lowvram.core.step import step
from lowvram.loops.profiling.post_run import post_run
from lowvram.loops.profiling.tensor_report import Birth, LargestTensors, NoReport
from lowvram.loops.session import Session
from tests.laboratory import CPU, PROBLEMS, knobs_of, make_batch, needs_gpu


def looked(folder: Path, choices: dict[str, str] | None = None, device: torch.device = CPU) -> Peak:
    task = PROBLEMS["transformer"]
    rig, batch = assemble(task, knobs_of(**(choices or {})), device), make_batch(task.spec, 64).to(device)
    step(rig, batch)
    report = LargestTensors(rig.model, device, folder)
    with report, ledger(rig.model, rig.stepper, batch.tensors(), origin_of=report.origin_of) as peak:
        step(rig, batch)
    report.write(peak)
    return peak


@pytest.mark.parametrize("choices", [{}, {"ckpt": "every1", "accum": "x4"}, {"offload": "activations"}], ids=str)
def test_tensors_add_up_to_the_kinds_and_nothing_else_changes(choices: dict[str, str], tmp_path: Path) -> None:
    peak = looked(tmp_path, choices)
    for kind in Kind:
        assert sum(held.num_bytes for held in peak.holdings if held.kind is kind) == peak.by_kind[kind]
    task = PROBLEMS["transformer"]
    rig, batch = assemble(task, knobs_of(**choices), CPU), make_batch(task.spec, 64)
    step(rig, batch)
    with ledger(rig.model, rig.stepper, batch.tensors()) as plain:
        step(rig, batch)
    assert plain == replace(peak, holdings=[])
    assert not module._global_forward_hooks
    assert not module._global_forward_pre_hooks


def test_each_says_where_it_was_made(tmp_path: Path) -> None:
    births: dict[Kind, list[Birth]] = {}
    for held in looked(tmp_path).holdings:
        births.setdefault(held.kind, []).append(held.origin)
    assert "blocks.0.mlp.up.weight" in {birth.maker for birth in births[Kind.PARAMETERS]}
    assert {birth.place for birth in births[Kind.OPTIMIZER]} == {"before the step"}
    wide = [birth for birth in births[Kind.ACTIVATIONS] if birth.shape == (64, 8, 64)]
    assert {birth.maker for birth in wide} >= {"gelu"}
    assert any("blocks.0" in birth.place and "lowvram/models/transformer.py:" in birth.place for birth in wide)


def test_what_the_backward_pass_makes_names_its_node(tmp_path: Path) -> None:
    places = {held.origin.place for held in looked(tmp_path, {"ckpt": "every1"}).holdings}
    assert any(place.startswith("backward of ") for place in places)
    assert any("lowvram/models/transformer.py:" in place for place in places)  # computed again


def test_it_is_printed_and_written(
    make_session: Callable[..., Session], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    session = make_session()
    wanted = replace(session.settings.measure, largest_tensors=True)
    session = replace(session, settings=replace(session.settings, measure=wanted))
    memory = post_run(session, session.batches(0))["memory"]
    said, page = capsys.readouterr().out, (tmp_path / "memory.md").read_text()
    assert said.startswith("the largest tensors at the peak of ")
    assert "lowvram/models/transformer.py:" in said
    assert "| activations | " in page
    assert f" | {memory['by_kind']['activations']} | " in page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["memory.md", "memory_over_step.csv"]


def test_off_it_leaves_nothing(make_session: Callable[..., Session], capsys: pytest.CaptureFixture[str]) -> None:
    session = make_session()
    post_run(session, session.batches(0))
    assert [path.name for path in session.folder.iterdir()] == ["memory_over_step.csv"]
    assert not capsys.readouterr().out
    assert NoReport().origin_of is None


@needs_gpu[0]
@needs_gpu[1]
def test_a_card_leaves_a_snapshot_and_its_page(tmp_path: Path) -> None:
    looked(tmp_path, device=torch.device("cuda"))
    snapshot = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    assert any(snapshot["device_traces"])
    assert "snapshot.pickle" in (tmp_path / "snapshot.html").read_text()
