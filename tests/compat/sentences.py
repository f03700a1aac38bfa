"""What a test of a private name says when a new version of its library has broken it: one sentence."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

PACKAGES = {"hydra": "hydra-core", "wandb_workspaces": "wandb-workspaces"}  # others are called as they are imported


def needed(name: str, by: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator of a test of one private name. The test imports what it tests itself: if that fails, it is told too.

    Args:
        name: in full.
        by: whom it would break.
    """

    def decorator(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def told(*args: Any, **kwargs: Any) -> None:
            try:
                test(*args, **kwargs)
                return
            except Exception as error:
                broken = sentence(name, by, Path(test.__code__.co_filename), error)
            pytest.fail(broken, pytrace=False)

        return told

    return decorator


def sentence(name: str, by: str, test_file: Path, error: Exception) -> str:
    library = name.partition(".")[0]
    module = test_file.name.removeprefix("test_")
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return (
        f"{name} is gone or does something else in {library} {version(PACKAGES.get(library, library))}:"
        f" {by} needs it, see lowvram/compat/{module} ({reason})"
    )
