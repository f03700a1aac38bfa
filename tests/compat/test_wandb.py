"""Private names of Weights & Biases."""

from __future__ import annotations

import json

import pytest

from tests.compat.sentences import needed


@pytest.mark.filterwarnings("ignore:Pydantic V1 style:DeprecationWarning")
@needed("wandb_workspaces.workspaces.Workspace._to_model", by="scripts/wandb_workspace.py --print")
def test_a_workspace_is_reported_as_it_would_be_saved() -> None:
    pytest.importorskip("wandb_workspaces", reason="needs lowvram[workspace]")
    from wandb_workspaces.workspaces import Section, Workspace

    from lowvram.compat.wandb import workspace_values

    values = workspace_values(
        Workspace(entity="somebody", project="mine", name="charts", sections=[Section(name="Losses")])
    )
    assert (values["entity"], values["project"]) == ("somebody", "mine")
    sections = values["spec"]["section"]["panelBankConfig"]["sections"]
    assert "Losses" in [section["name"] for section in sections]
    json.dumps(values)
