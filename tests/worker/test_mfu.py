"""Model FLOPs utilisation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from lowvram.config.registry import knob_of
from lowvram.loops.session import Session
from lowvram.worker.mfu import mfu, model_flops, peak_rate
from tests.laboratory import OPTIONS


def test_rates_are_found_by_what_the_driver_calls_a_card() -> None:
    assert peak_rate("NVIDIA H100 PCIe", "bf16") == 756e12
    assert peak_rate("NVIDIA H100 80GB HBM3", "bf16") == 989.4e12
    assert peak_rate("NVIDIA A100-SXM4-40GB", "fp8") is None
    assert peak_rate("Tesla T4", "bf16") is None
    assert peak_rate("Some other card", "fp32") is None
    assert peak_rate("NVIDIA H200", None) is None


def test_every_precision_has_its_rate() -> None:
    knobs = {option: knob_of(("precision", option)) for option in OPTIONS["precision"]}
    rates = {option: peak_rate("NVIDIA H200", knob.product_format) for option, knob in knobs.items()}
    assert rates["bf16_pure"] == rates["bf16"]
    assert all(rate is not None and rate >= 66.9e12 for rate in rates.values()), rates


def test_it_is_unknown_without_a_card_or_a_time(make_session: Callable[..., Session]) -> None:
    session = make_session()
    assert mfu(session, 10.0) is None
    assert mfu(on_a_card(session), None) is None


def test_it_is_the_models_arithmetic_over_the_peak(
    make_session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = on_a_card(make_session(choices={"precision": "bf16"}))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-40GB")
    samples_per_s = 0.5 * 312e12 / model_flops(session.problem, session.knobs)
    assert mfu(session, samples_per_s) == pytest.approx(0.5)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some other card")
    assert mfu(session, samples_per_s) is None


def on_a_card(session: Session) -> Session:
    return replace(session, rig=replace(session.rig, device=torch.device("cuda")))
