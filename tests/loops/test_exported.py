"""What a row says of the exported file."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lowvram.config.errors import BadInput, BadSample
from lowvram.config.transforms import ExportFormat
from lowvram.loops import train
from lowvram.loops.export import load
from lowvram.loops.export.folder import file_bytes, format_of
from lowvram.loops.exported import held_out, interleaved_ms, mean_loss
from lowvram.loops.profiling import post_run
from lowvram.loops.session import Interrupted, Session
from lowvram.loops.train import Train
from tests.loops.sessions import BATCH_SIZE, Told

MakeSession = Callable[..., Session]


def test_the_loss_is_that_of_the_file(make_session: MakeSession) -> None:
    session = make_session(export=ExportFormat.int4)
    row = Train().run(session)
    model = load(session.folder / "model")
    with torch.no_grad():
        wanted = mean_loss(session.problem, model, held_out(session))
    assert row["eval"]["loss_exported"] == pytest.approx(wanted, rel=1e-6)
    assert row["eval"]["loss_exported"] != pytest.approx(row["loss"]["eval"], rel=1e-6)
    assert row["export"]["file_bytes"] == file_bytes(session.folder / "model")
    assert row["export"]["latency_ms"] > 0 < row["export"]["latency_fp32_ms"]


def test_a_file_that_rounds_nothing_has_the_loss_of_the_model(make_session: MakeSession) -> None:
    row = Train().run(make_session("resnet", export=ExportFormat.torch_export))
    assert row["eval"]["loss_exported"] == pytest.approx(row["loss"]["eval"], rel=1e-5)


def test_only_what_the_file_does_is_the_formats_fault(
    make_session: MakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A held-out sample that can't be read any more, after the training, tells of itself."""
    session = make_session(export=ExportFormat.int8)
    samples, num_read = session.data.eval, itertools.count(1)
    sample = samples.sample

    def damaged(index: int, epoch: int) -> Any:
        if next(num_read) > 2 * len(samples):  # in the evaluation, for the file, and now through the file
            raise BadSample("3.png: can't be read")
        return sample(index, epoch)

    monkeypatch.setattr(samples, "sample", damaged)
    with pytest.raises(BadSample):
        Train().run(session)

    def broken(*_: object) -> Any:
        raise ValueError("no such operator")

    monkeypatch.setattr(type(format_of(ExportFormat.int8)), "outputs", broken)
    with pytest.raises(BadInput, match=r"^export\.format='int8': must be another format.*no such operator"):
        Train().run(make_session(is_resumed=True, export=ExportFormat.int8))


def test_plain_weights_are_not_evaluated_again(make_session: MakeSession) -> None:
    session = make_session()
    row = Train().run(session)
    assert row["export"] == {"file_bytes": (session.folder / "model" / "model.safetensors").stat().st_size}
    assert "loss_exported" not in row["eval"]


def test_the_peaks_of_the_run_are_read_before_the_export(
    make_session: MakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    resident = [10**9]

    def exporting(*_: object) -> dict[str, Any]:
        resident[0] = 10**12
        return {}

    monkeypatch.setattr(train, "export_weights", exporting)
    monkeypatch.setattr(post_run, "status_bytes", lambda name: resident[0])
    memory = Train().run(make_session())["memory"]
    assert memory["process_peak_bytes"] == memory["host_peak_bytes"] == 10**9
    assert resident == [10**12]


def test_what_the_export_leaves_in_memory_is_not_the_steps(
    make_session: MakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = list[torch.Tensor]()

    def exporting(*_: object) -> dict[str, Any]:
        left.append(torch.ones(2**25))
        return {}

    monkeypatch.setattr(train, "export_weights", exporting)
    assert Train().run(make_session())["memory"]["beyond_tensors_bytes"] < left[0].nbytes / 2


@pytest.mark.parametrize(("problem", "qat"), [("transformer", "int4"), ("resnet", "int8")])
def test_a_run_with_rounded_weights_goes_on_to_the_last_digit(
    make_session: MakeSession, problem: str, qat: str
) -> None:
    common: dict[str, Any] = {"problem": problem, "choices": {"qat": qat}}
    whole = make_session(**common)
    Train().run(whole)
    folder = whole.folder / "stopped"
    folder.mkdir()
    with pytest.raises(Interrupted):
        Train().run(replace(make_session(told=Told(stop_at=3), **common), folder=folder))
    Train().run(replace(make_session(is_resumed=True, **common), folder=folder))
    states = [load(place / "model").state_dict() for place in (whole.folder, folder)]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_a_finished_run_is_written_in_another_format(make_session: MakeSession) -> None:
    first = Train().run(make_session())
    row = Train().run(make_session(is_resumed=True, export=ExportFormat.int8))
    assert row["loss"]["last"] == first["loss"]["last"]
    assert row["export"]["file_bytes"] < first["export"]["file_bytes"]


def test_a_format_that_the_model_can_not_have_is_refused_before_the_first_step(make_session: MakeSession) -> None:
    session = make_session("resnet", export=ExportFormat.int8)
    with pytest.raises(BadInput, match=r"^export\.format='int8'"):
        Train().run(session)
    assert not session.events.events  # pyright: ignore


def test_all_held_out_samples_are_in_the_parts_once(make_session: MakeSession) -> None:
    session = make_session()
    parts = list(held_out(session))
    assert [part.num_samples for part in parts] == [BATCH_SIZE, BATCH_SIZE, 2]
    assert torch.equal(torch.cat([part.inputs for part in parts]), session.data.eval.batch.inputs)  # pyright: ignore


def test_both_are_timed_in_turn() -> None:
    calls: list[str] = []
    interleaved_ms(lambda inputs: calls.append("a"), lambda inputs: calls.append("b"), None)
    assert calls[:6] == ["a", "b", "a", "b", "a", "b"]
    assert calls.count("a") == calls.count("b")
