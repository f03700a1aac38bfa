"""What examples/ ships fits the configuration that it speaks of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from tests.calls import TINY, Outcome

ROOT = Path(__file__).parents[1]


def one_of(parameter: Any) -> Any:
    """A value that the agent could pick."""
    found = next(parameter[key] for key in ("value", "min", "values") if key in parameter)
    return found[-1] if isinstance(found, list) else found


def test_a_run_that_an_agent_of_wandb_would_start(call: Callable[..., Outcome]) -> None:
    sweep = OmegaConf.load(ROOT / "examples" / "wandb_sweep.yaml")
    picked = {key: one_of(OmegaConf.to_container(parameter)) for key, parameter in sweep.parameters.items()}
    outcome = call(*(f"{key}={value}" for key, value in picked.items()), *TINY)
    assert outcome.code == 0, outcome.said()
    assert outcome.row["choices"]["precision"] == picked["precision"]
    assert outcome.row["loss"]["eval"] is not None  # what the sweep minimises
    assert (ROOT / sweep.program).exists()
