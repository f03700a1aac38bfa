"""What W&B's own variables of the environment say, where nothing is typed: scripts that set them for other trainers
work with lowvram too. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lowvram.config.parent_settings import LONGEST_GROUP

DEFAULT_PROJECT = "lowvram"


def name(settings: Mapping[str, Any]) -> str | None:
    """WANDB_NAME, if W&B records and no `name` was typed.

    Args:
        settings: the composed configuration.
    """
    return said("WANDB_NAME") if settings["logger"]["wandb"] and settings["name"] is None else None


def group(settings: Mapping[str, Any]) -> str | None:
    """WANDB_RUN_GROUP, if W&B records."""
    text = said("WANDB_RUN_GROUP") if settings["logger"]["wandb"] else None
    return text and text[:LONGEST_GROUP]


def project() -> str:
    """WANDB_PROJECT, or lowvram's own."""
    return said("WANDB_PROJECT") or DEFAULT_PROJECT


def tags() -> list[str]:
    """WANDB_TAGS, which are separated by commas."""
    return [tag.strip() for tag in (said("WANDB_TAGS") or "").split(",") if tag.strip()]


def is_disabled() -> bool:
    """WANDB_DISABLED, which other trainers know and today's W&B itself doesn't: anything but an empty value or no."""
    return (said("WANDB_DISABLED") or "0").lower() not in ("0", "false", "no", "off")


def said(variable: str) -> str | None:
    return os.environ.get(variable, "").strip() or None
