"""The fields of a row."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lowvram.data.spec import DataSpec, Modality
from lowvram.loops.fields import memory_held, memory_now, merged, pace, status_bytes, times
from lowvram.loops.session import Session

MakeSession = Callable[..., Session]


def test_fragments_of_a_section_are_put_together() -> None:
    assert merged({"a": {"x": 1}, "b": 2}, {"a": {"y": 3}}, {"b": 4, "c": None}) == {
        "a": {"x": 1, "y": 3},
        "b": 4,
        "c": None,
    }


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
