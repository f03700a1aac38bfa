"""A resumed run says that its data or its frozen weights are others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from lowvram.data.synthetic import ResolvedSynthetic
from lowvram.loops.origins import differences, origins_of
from tests.calls import Outcome
from tests.laboratory import TOKENS

TEXT = ("data=text", "data.sequence_length=16", "data.eval_samples=4", "train.batch_size=4")
TEXT += ("model.num_layers=1", "model.width=32", "model.num_heads=2", "logger=none", "device=cpu")


def test_frozen_weights_and_samples_that_changed_are_named() -> None:
    first, second = nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3)
    model, data = nn.Sequential(first, second), ResolvedSynthetic(TOKENS, 8).open(0)
    state = torch.get_rng_state()
    saved = origins_of(data, model, {"0.weight", "0.bias"})
    assert torch.equal(torch.get_rng_state(), state)
    assert differences(origins_of(data, model, {"0.weight", "0.bias"}), saved) == []
    with torch.no_grad():
        first.weight[2, 2] += 1
        second.weight.zero_()  # trains: it is in the snapshot
    (line,) = differences(origins_of(data, model, {"0.weight", "0.bias"}), saved)
    assert line.startswith("frozen weights aren't those of the snapshot (0.weight)")
    (line,) = differences(origins_of(ResolvedSynthetic(TOKENS, 8).open(1), model, set()), saved)
    assert line.startswith("the data aren't those of the snapshot (other samples)")


@pytest.mark.slow  # the test above is quicker
def test_a_file_that_grows_is_told(call: Callable[..., Outcome], tmp_path: Path) -> None:
    text = tmp_path / "grow.txt"
    text.write_text("".join(f"line {n} of a text\n" for n in range(300)))
    assert call(*TEXT, f"data.path={text}", "train.steps=2", "hydra.run.dir=outputs/run").code == 0
    again = call("resume=outputs/run", "train.steps=3")
    assert again.code == 0
    assert "the data aren't" not in again.out
    text.write_text(text.read_text() + "and a line more")
    assert "the data aren't those of the snapshot (" in call("resume=outputs/run", "train.steps=4").out
