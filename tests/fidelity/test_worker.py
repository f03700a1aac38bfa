"""How gradients are collected from any stepper, and compared."""

from __future__ import annotations

import math
import os
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lowvram.core.knob import Knob
from lowvram.core.stepper import Update
from lowvram.fidelity import worker as fidelity
from lowvram.fidelity.worker import Fidelity, compared, first_step
from lowvram.knobs.precision import Fp16
from lowvram.knobs.stepping import AfterBackward, CpuOffload, InBackward, Norm
from lowvram.results.files.durable import remove_leftovers
from tests.loops.sessions import Told, session_in


def vectors(*values: list[float] | None) -> list[Tensor | None]:
    return [None if each is None else torch.tensor(each) for each in values]


def test_numbers_of_known_vectors() -> None:
    found, wanted = vectors([3.0, 0.0], [2.0]), vectors([0.0, 4.0], [2.0])
    error, cosine = compared(zip(found, wanted, strict=True))
    assert error == pytest.approx(5 / math.sqrt(20))
    assert cosine == pytest.approx(4 / math.sqrt(13 * 20))


def test_the_same_twice_as_large() -> None:
    wanted = torch.randn(5, 7)
    assert compared([(wanted, wanted)]) == (0.0, pytest.approx(1.0))
    assert compared([(2 * wanted, wanted)]) == (1.0, pytest.approx(1.0))
    assert compared([(-wanted, wanted)]) == (2.0, pytest.approx(-1.0))


def test_a_missing_gradient_is_zero() -> None:
    one, other = vectors([3.0], [4.0])
    assert compared([(None, one), (other, other)]) == (pytest.approx(0.6), pytest.approx(0.8))
    assert compared([(one, None), (other, other)]) == (pytest.approx(0.75), pytest.approx(0.8))


def test_nothing_to_compare_with() -> None:
    zero, one = vectors([0.0], [1.0])
    assert compared([(zero, zero)]) == (0.0, None)
    assert compared([(one, zero)]) == (None, None)
    assert compared([(zero, one)]) == (1.0, None)


def test_pieces_are_all_there(monkeypatch: pytest.MonkeyPatch) -> None:
    found, wanted = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last), torch.randn(4, 3, 2, 2)
    whole = compared([(found, wanted)])
    monkeypatch.setattr(fidelity, "PIECE_ELEMENTS", 7)
    assert compared([(found, wanted)]) == pytest.approx(whole)
    assert whole.gradient_error == pytest.approx(float((found - wanted).norm() / wanted.norm()))


def run(file: Path, is_reference: bool, **choices: str | Knob) -> dict[str, dict[str, Any]]:
    """What a run of three steps tells, by event."""
    mode, told = Fidelity(3, file, is_reference), Told()
    mode.run(session_in(file.parent, choices={**choices, "watch": mode.watch}, told=told))
    return dict(told.events)


@pytest.mark.parametrize("clip", [None, 1e-3])
@pytest.mark.parametrize(
    "stepping",
    [AfterBackward(), CpuOffload(), InBackward(), InBackward(norm=Norm.two_passes), InBackward(norm=Norm.last_step)],
    ids=str,
)
@pytest.mark.parametrize("accum", ["none", "x2"])
def test_every_stepper_shows_its_gradients(tmp_path: Path, stepping: Any, clip: float | None, accum: str) -> None:
    """As they were before they were clipped."""
    wanted = run(tmp_path / "wanted", True)
    assert "compared" not in wanted
    found = run(tmp_path / "wanted", False, stepping=replace(stepping, clip=clip), accum=accum)
    assert found["compared"]["gradient_error"] < 2e-6
    assert found["compared"]["gradient_cosine"] == pytest.approx(1)
    if clip is None:
        assert found["history"]["losses"] == pytest.approx(wanted["history"]["losses"], rel=1e-5)


def test_a_loss_scale_is_taken_out_and_a_skipped_step_made_again(tmp_path: Path) -> None:
    """The first batch is the one that counts, whatever scale it takes."""
    run(tmp_path / "wanted", True)
    modest, immodest = (
        run(tmp_path / "wanted", False, precision=Fp16(init_scale=scale))["compared"] for scale in (2.0, 2.0**31)
    )
    assert modest["gradient_error"] < 5e-3
    assert immodest["gradient_error"] < 5e-3


def test_what_a_rank_holds_of_a_file_that_knows_more(tmp_path: Path) -> None:
    """Parameters that don't train in a point count as zero."""
    run(tmp_path / "wanted", True)
    found = run(tmp_path / "wanted", False, adapter="freeze")
    assert 0.1 < found["compared"]["gradient_error"] < 1
    assert 0.1 < found["compared"]["gradient_cosine"] < 1


def test_gradients_of_a_process_that_was_killed_leave_nothing_that_nobody_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors writes beside the file under a name of its own."""

    def die(tensors: Any, path: str) -> None:
        Path(path).with_name(".tmpCX68DU").write_bytes(b"half")
        os._exit(0)

    monkeypatch.setattr(fidelity, "save_file", die)
    if not (pid := os.fork()):
        fidelity.save_whole(tmp_path / "gradients.safetensors", {})
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    assert list(tmp_path.iterdir()) != []
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_step_made_again_draws_the_same() -> None:
    draws: list[tuple[float, float, float]] = []

    def update(*_: Any) -> tuple[Tensor, Update]:
        draws.append((float(torch.rand(())), float(np.random.rand()), random.random()))
        return torch.zeros(()), Update(torch.zeros(()), applied=len(draws) == 3)

    session: Any = SimpleNamespace(update=update, rig=SimpleNamespace(model=nn.Linear(1, 1)))
    first_step(session, 1, None)
    assert draws == [draws[0]] * 3
