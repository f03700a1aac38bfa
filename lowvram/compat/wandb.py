"""Private names of Weights & Biases."""

from __future__ import annotations

from typing import Any


def workspace_values(workspace: Any) -> dict[str, Any]:
    """What a workspace's `save` would send, as plain values.

    wandb_workspaces' Workspace._to_model, since 0.1.4 at the latest: publicly a workspace can only be saved online.
    Replaced by a public way to write one to a file, if W&B makes it.
    """
    return workspace._to_model().model_dump(by_alias=True, exclude_none=True, mode="json")
