"""Model FLOPs utilisation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from lowvram.config.registry import knob_of
from lowvram.data.spec import DataSpec, Modality
from lowvram.loops.session import Session
from lowvram.models.external import ExternalConfig
from lowvram.tasks import Auto
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


class Normed(nn.Module):
    """A batch norm of features, which takes two samples to train."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 5), nn.BatchNorm1d(5))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


class Untraceable(Normed):
    """It reads the value of a tensor, which a trace doesn't have."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images) * (1 if images.mean().item() > 0 else 2)


def test_models_of_others_have_it_or_go_without(
    make_session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-40GB")
    session, spec = on_a_card(make_session()), DataSpec(Modality.IMAGES, 5, (3, 8, 8))
    of = {
        model: replace(session, problem=Auto().pose(ExternalConfig(f"{__name__}.{model.__name__}"), spec))
        for model in (Normed, Untraceable)
    }
    forward_flops = 2 * (3 * 8 * 8) * 5  # of a sample; the backward pass only has the gradient of the weight
    assert model_flops(of[Normed].problem, session.knobs) == 2 * forward_flops
    assert mfu(of[Normed], 312e12 / forward_flops) is not None
    assert mfu(of[Untraceable], 1000.0) is None


def on_a_card(session: Session) -> Session:
    return replace(session, rig=replace(session.rig, device=torch.device("cuda")))
