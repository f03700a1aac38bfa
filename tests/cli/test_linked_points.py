"""Points of a list that go on from earlier ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lowvram.cli.linked_points import rounds
from lowvram.cli.sweep import with_points
from lowvram.config.errors import BadInput
from tests.calls import TINY, Outcome

Call = Callable[..., Outcome]
LIST = """\
# @package _global_
hydra:
  mode: MULTIRUN
  sweeper:
    points:
      large: ""
      small: mode=prune prune.run=point:large prune.round_to=2
      small, trained on: model.init=point:small task=distill task.teacher=point:large
      bad: ckpt=compiler
      after bad: model.init=point:bad
"""


def test_a_point_runs_after_those_that_it_goes_on_from() -> None:
    with pytest.raises(BadInput, match=r"model\.init='point:b': must be point: and the name of a point before it"):
        with_points([[]], {"a": "model.init=point:b", "b": ""})
    batch, _ = with_points(
        [["seed=5"], ["seed=6"]], {"a": "", "b c": "p=point:a", "d": "e=1", "f": "p=point:d q='point:b c'"}
    )
    assert batch[:4] == [["seed=5"], ["seed=5", "p=point:0"], ["seed=5", "e=1"], ["seed=5", "p=point:2", "q=point:1"]]
    assert batch[5] == ["seed=6", "p=point:4"]
    assert rounds(batch) == [[0, 2, 4, 6], [1, 5], [3, 7]]


def pruned_and_taught(call: Call, tmp_path: Path) -> list[str]:
    """The words of a sweep whose points go on from others, which has run."""
    (tmp_path / "mine" / "sweep").mkdir(parents=True)
    (tmp_path / "mine" / "sweep" / "lineage.yaml").write_text(LIST)
    words = ["--config-dir", "mine", "sweep=lineage", *TINY, "hydra.sweep.dir=lineage"]
    outcome = call(*words)
    assert outcome.statuses == {"large": "ok", "bad": "incompatible", "small": "ok", "small, trained on": "ok"}
    assert outcome.code == 0, outcome.said()
    assert "after bad: left out, as model.init is the folder of bad, which has no model" in outcome.out
    rows = outcome.rows
    sizes = {name: rows[name]["model"]["parameters"] for name in ("large", "small, trained on")}
    assert sizes["small, trained on"] == rows["small"]["pruning"]["parameters_after"] < sizes["large"]
    assert rows["small, trained on"]["config"]["task"]["teacher"] == str(outcome.folders[0])
    note = OmegaConf.load(tmp_path / "lineage" / "multirun.yaml")
    assert set(note.hydra.overrides.task) == {"sweep=lineage", *TINY}  # what was typed, not what points add
    return words


@pytest.mark.slow
def test_models_are_pruned_and_taught_within_a_sweep(call: Call, tmp_path: Path) -> None:
    pruned_and_taught(call, tmp_path)


@pytest.mark.slow
def test_the_same_sweep_again_runs_nothing(call: Call, tmp_path: Path) -> None:
    again = call(*pruned_and_taught(call, tmp_path))
    assert again.code == 0
    assert ": started, 3 steps" not in again.out
