"""The fields of a row."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lowvram.core.stepper import StepperAround
from lowvram.data.spec import DataSpec, Modality
from lowvram.loops.fields import common, memory_held, memory_now, merged, of_data, pace, status_bytes, times
from lowvram.loops.session import Session
from lowvram.results import row, row_fields
from lowvram.results.metrics import METRICS, Metric

MakeSession = Callable[..., Session]


def test_fragments_of_a_section_are_put_together() -> None:
    assert merged({"a": {"x": 1}, "b": 2}, {"a": {"y": 3}}, {"b": 4, "c": None}) == {
        "a": {"x": 1, "y": 3},
        "b": 4,
        "c": None,
    }


class Burning(StepperAround):
    """Measures what nobody has heard of."""

    def figures(self) -> Mapping[str, float]:
        return {**self.inner.figures(), "energy.joule_per_step": 1.5, "memory.swapped_bytes": 7}


class Swapping:
    """A cache that does so."""

    def around(self, images: Any) -> Any:
        return images

    def figures(self, device: torch.device) -> Mapping[str, float]:
        return {"data.swapped_bytes": 3}


def test_a_new_figure_takes_its_entry_and_what_reports_it(
    make_session: MakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing between the stepper, or the loader, and the row names a figure. What is shown of it, and where, is held
    by tests/results/test_metrics.py."""
    session = make_session(choices={"precision": "fp16", "activations": "int8"})
    session = replace(session, data=replace(session.data, cache=Swapping()))
    session = replace(session, rig=replace(session.rig, stepper=Burning(session.rig.stepper)))
    found = merged(common(session), of_data(session))
    with pytest.raises(KeyError, match="a row has no key 'energy'"):
        row.merge(row.empty_row(), found)
    names = ("energy.joule_per_step", "memory.swapped_bytes", "data.swapped_bytes")
    monkeypatch.setattr(row_fields, "METRICS", (*METRICS, *(Metric(name, name) for name in names)))
    whole = row.merge(row.empty_row(), found)
    assert [row_fields.at(whole, name) for name in names] == [1.5, 7, 3]
    assert whole["precision"] == {"skipped_steps": 0, "scale": 2.0**16}
    assert whole["memory"]["peak_bytes"] is None
    assert row.parsed(row.to_json(whole)) == whole


def counts(num_tokens: int, num_places: int) -> torch.Tensor:
    return torch.tensor([num_tokens, num_places])


def test_throughput_counts_tokens_not_padding(make_session: MakeSession) -> None:
    session = make_session(batch_size=4)
    found = pace(session, [counts(10, 20), counts(20, 20)], seconds=2.0)
    assert found == {
        "throughput/samples_per_s": 4.0,
        "throughput/tokens_per_s": 15.0,
        "data/padding": 0.25,
        "time/step_ms": 1000.0,
    }
    images = pace(make_session("resnet"), [counts(10, 10)], seconds=2.0)
    assert images.keys() == {"throughput/samples_per_s", "time/step_ms"}
    texts = replace(session.data, spec=DataSpec(Modality.LABELLED_TOKENS, 2, (8,), 256))
    assert pace(replace(session, data=texts), [counts(10, 32)], 2.0)["throughput/tokens_per_s"] == 5.0


def test_times_are_of_the_timed_steps(make_session: MakeSession) -> None:
    step_ms = [float(ms) for ms in range(1, 22)]
    found = times(make_session(), step_ms, [0.001] * 21, [counts(8, 10)] * 21)
    assert found["time"] == {
        "steps": 21,
        "step_ms_p50": 11.0,
        "step_ms_p05": 2.0,
        "step_ms_p95": 20.0,
        "data_wait_frac": pytest.approx(21 / 231),
    }
    assert found["throughput"]["tokens_per_s"] == pytest.approx(21 * 8 / 0.231)
    assert found["data"] == {"padding": pytest.approx(0.2)}


def test_a_single_step_is_all_percentiles_and_none_is_nothing(make_session: MakeSession) -> None:
    found = times(make_session(), [5.0], [0.1], [counts(8, 10)])
    assert {found["time"][name] for name in ("step_ms_p05", "step_ms_p50", "step_ms_p95")} == {5.0}
    assert found["time"]["data_wait_frac"] == 1.0
    assert times(make_session(), [], [], []) == {"time": {"steps": 0}}


def test_the_process_can_be_asked_for_its_size() -> None:
    resident_bytes = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert status_bytes("VmRSS") == pytest.approx(resident_bytes, rel=0.1)
    assert status_bytes("VmHWM") >= status_bytes("VmRSS") * 0.9
    with pytest.raises(KeyError):
        status_bytes("VmNothing")


def test_memory_held_is_told_by_kind(make_session: MakeSession) -> None:
    session = make_session()
    held = memory_held(session)
    assert held["memory_now/parameters_gib"] > 0
    assert held["memory_now/gradients_gib"] == held["memory_now/optimizer_gib"] == 0  # before the first step
    assert memory_now(session).keys() == {"memory/process_gib"}
