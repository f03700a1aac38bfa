"""Model FLOPs utilisation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from lowvram.modes.session import Session
from lowvram.modes.trace import model_flops
from lowvram.modes.utilisation import PEAK_TFLOPS, mfu, peak_rate


def test_cards_are_found_by_what_their_name_contains() -> None:
    assert peak_rate("NVIDIA H100 PCIe", "bf16") == 756.0
    assert peak_rate("NVIDIA H100 80GB HBM3", "bf16") == peak_rate("NVIDIA H100 80GB HBM3", "bf16_pure") == 989.4
    assert peak_rate("NVIDIA A100-SXM4-40GB", "fp8") is None
    assert peak_rate("Tesla T4", "bf16") is None
    assert peak_rate("Some other card", "fp32") is None


def test_a_rate_of_every_precision_is_at_least_that_of_fp32() -> None:
    assert all(rates["fp32"] <= rate for rates in PEAK_TFLOPS.values() for rate in rates.values())


def test_it_is_unknown_without_a_card_or_a_time(make_session: Callable[..., Session]) -> None:
    session = make_session()
    assert mfu(session, 10.0, "fp32") is None
    assert mfu(on_a_card(session), None, "fp32") is None


def test_it_is_the_models_arithmetic_over_the_peak(
    make_session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = on_a_card(make_session())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-40GB")
    samples_per_s = 0.5 * 312e12 / model_flops(session.problem, session.knobs)
    assert mfu(session, samples_per_s, "bf16") == pytest.approx(0.5)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some other card")
    assert mfu(session, samples_per_s, "bf16") is None


def on_a_card(session: Session) -> Session:
    return replace(session, rig=replace(session.rig, device=torch.device("cuda")))
