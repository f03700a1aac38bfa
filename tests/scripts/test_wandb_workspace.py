"""scripts/wandb_workspace.py: what it would save, without a server."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from lowvram.config.registry import neutral_options
from lowvram.results.loggers.logger import final_values
from lowvram.results.loggers.wandb_sweep import TABLE
from lowvram.results.row import KINDS, empty_row, merge
from scripts.wandb_workspace import main
from tests.synthetic import point

# wandb-workspaces declares its types in the way of pydantic 1.
pytestmark = pytest.mark.filterwarnings("ignore:Pydantic V1 style:DeprecationWarning")


@pytest.fixture
def saved(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The spec, as it would be sent."""
    pytest.importorskip("wandb_workspaces", reason="needs lowvram[workspace]")
    assert main(["somebody", "mine", "--group", "precision", "--print"]) == 0
    return json.loads(capsys.readouterr().out)


def panels(saved: dict[str, Any]) -> list[dict[str, Any]]:
    sections = saved["spec"]["section"]["panelBankConfig"]["sections"]
    return [panel for section in sections for panel in section["panels"]]


def test_it_is_of_the_project_and_grouped_as_asked(saved: dict[str, Any]) -> None:
    assert (saved["entity"], saved["project"]) == ("somebody", "mine")
    (runs,) = saved["spec"]["section"]["runSets"]
    assert runs["grouping"] == [{"section": "config", "name": "choice.value.precision"}]
    assert {f"config:choice.{name}" for name in neutral_options()} <= set(runs["runFeed"]["columnVisible"])


def test_every_panel_shows_what_runs_record(saved: dict[str, Any]) -> None:
    """Axes and bars are names of a run's summary or of its steps."""
    row = merge(point(0, {}), {"fidelity": {"gradient_error": 0.1, "loss_gap": 0.0}})
    within = {f"memory_in_step/{name}" for name in ("moment", *(f"{kind}_gib" for kind in KINDS))}
    held = {f"memory_now/{kind}_gib" for kind in ("parameters", "gradients", "optimizer", "host")}
    recorded = {*final_values(row), "grad_norm", *held, *within}
    configs = [panel["config"] for panel in panels(saved) if panel["viewType"] != "Weave"]
    axes = {
        config[axis].removeprefix("summary:") for config in configs for axis in ("xAxis", "yAxis") if axis in config
    }
    metrics = {name for config in configs for name in config.get("metrics", ())}
    assert {"memory/peak_gib", "throughput/samples_per_s", "fidelity/gradient_error"} <= axes
    assert {f"memory/{kind}_gib" for kind in KINDS} <= metrics
    assert axes - {"step"} | metrics <= recorded | set(
        final_values(merge(empty_row(), {"plan": {"allocated_bytes": 1}}))
    )


def test_each_group_has_its_bars_and_a_sweep_its_table_and_figures(saved: dict[str, Any]) -> None:
    found = panels(saved)
    grouped = {panel["config"].get("groupBy") for panel in found if panel["viewType"] == "Bar Chart"}
    assert {f"choice.value.{group}" for group in neutral_options()} <= grouped
    assert [TABLE in json.dumps(panel) for panel in found if panel["viewType"] == "Weave"] == [True]
    (media,) = [panel["config"]["mediaKeys"] for panel in found if panel["viewType"] == "Media Browser"]
    assert "figures/waterfall" in media


def test_an_unknown_group_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["somebody", "--group", "precisions"]) == 3
    assert "--group precisions: no such group: use one of " in capsys.readouterr().err


def test_without_the_package_it_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    assert main(["somebody"]) == 3
    assert capsys.readouterr().err.strip().endswith("pip install 'lowvram[workspace]'")
