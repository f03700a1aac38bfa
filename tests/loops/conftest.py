"""Sessions without a parent."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from lowvram.loops.session import Session
from tests.loops.sessions import session_in


@pytest.fixture
def make_session(tmp_path: Path) -> Callable[..., Session]:
    """Makes sessions that share a folder: `session_in` without its first argument."""
    return partial(session_in, tmp_path)
