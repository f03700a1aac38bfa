"""What tests of weights in host memory share: a model of many blocks, its ledger, and runs that stop and go on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowvram.core.assemble import assemble
from lowvram.core.knob import Knob
from lowvram.core.ledger import Peak, ledger
from lowvram.core.rig import Rig
from lowvram.core.step import step
from lowvram.loops.export.folder import load
from lowvram.loops.session import Interrupted
from lowvram.loops.train import Train
from lowvram.tasks import Auto
from tests.laboratory import CPU, TOKENS, TRANSFORMER, Trained, knobs_of, make_batch, relative_error
from tests.loops.sessions import Told, session_in

Choices = dict[str, str | Knob]
DEEP = Auto().pose(replace(TRANSFORMER, num_layers=8, width=32), TOKENS)


def measured(device: torch.device, choices: Choices) -> tuple[Rig, Peak]:
    """The ledger of a later step."""
    rig, batch = assemble(DEEP, knobs_of(**choices), device), make_batch(TOKENS, 32).to(device)
    step(rig, batch)
    with ledger(rig.model, rig.stepper, batch.tensors(), device) as peak:
        step(rig, batch)
    return rig, peak


def check_equal(found: Trained, wanted: Trained, choices: Choices, device: torch.device) -> None:
    """To the bit on the CPU."""
    band = 0.0 if device == CPU else band_on_card(choices)
    assert relative_error({"": torch.stack(found.losses)}, {"": torch.stack(wanted.losses)}) <= band
    assert relative_error(to_cpu(found.gradients), to_cpu(wanted.gradients)) <= band
    assert relative_error(to_cpu(found.buffers), to_cpu(wanted.buffers)) <= band
    if device == CPU:
        assert relative_error(found.parameters, wanted.parameters) == 0


def band_on_card(choices: Choices) -> float:
    """Of three steps. There the host's update is another kernel than the card's; and in fp16 products differ, and so do
    two runs of fused attention or of cuDNN, while AdamW doesn't shrink small gradients."""
    return 1e-2 if "precision" in choices else 1e-5


def to_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def check_goes_on(folder: Path, whole: Choices, stopped: Choices, resumed: Choices) -> None:
    """A run that is stopped with one set of choices and resumed with another trains to the last digit as a whole one
    does."""

    def run(name: str, choices: Choices, told: Told, **more: Any) -> None:
        Train().run(session_in(folder / name, choices=choices, told=told, **more))

    wanted, first, second = Told(), Told(stop_at=3), Told()
    run("whole", whole, wanted)
    with pytest.raises(Interrupted):
        run("stopped", stopped, first)
    run("stopped", resumed, second, is_resumed=True)
    assert [*first.values("loss/train"), *second.values("loss/train")] == wanted.values("loss/train")
    weights = [load(folder / name / "model").state_dict() for name in ("stopped", "whole")]
    assert relative_error(*weights) == 0
