"""ema=device from the command line: what is evaluated and exported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from safetensors.torch import load_file

from tests.calls import TINY, Outcome
from tests.cli.test_bad_input import assert_refused

Call = Callable[..., Outcome]
WORDS = [*TINY, "device=cpu", "mode=train", "train.steps=4"]


def trained(call: Call, *words: str) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """The row of a run, and the weights of its exported model."""
    outcome = call(*WORDS, *words)
    assert outcome.code == 0, outcome.said()
    weights = load_file(outcome.folder / "model" / "model.safetensors")
    return outcome.row, {name: weight.tolist() for name, weight in weights.items()}


def test_averages_are_evaluated_and_exported_on_demand(call: Call) -> None:
    """With a decay of 0 they are the last weights."""
    plain, last_weights = trained(call)
    same, averages_without_decay = trained(call, "ema=device", "ema.decay=0", "ema.evaluate=true", "export.of=ema")
    averaged, averages = trained(call, "ema=device", "ema.decay=0.9", "ema.evaluate=true", "export.of=ema")
    kept, weights_beside_averages = trained(call, "ema=device", "ema.decay=0.9")
    assert last_weights == averages_without_decay == weights_beside_averages != averages
    assert plain["loss"]["eval"] == same["loss"]["eval"] == kept["loss"]["eval"] != averaged["loss"]["eval"]
    assert averaged["loss"]["last"] == plain["loss"]["last"]
    assert "averages of the weights" in averaged["semantics_changed"]
    assert kept["semantics_changed"] is None


def test_without_averages_none_are_exported(call: Call) -> None:
    assert_refused(call(*WORDS, "export.of=ema"), "export.of='ema': must be last", "ema=device")
