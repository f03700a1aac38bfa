"""Errors with one sentence."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from lowvram.config.errors import BadInput
from lowvram.results.files.claim import Held


@pytest.mark.parametrize(
    "error", [BadInput("ckpt.every", 0, "at least 1"), Held("resume", Path("outputs/a"), "process 1 on a")]
)
def test_a_mistake_can_be_sent_to_another_process(error: BadInput) -> None:
    """As one of several ranks, or a launcher's job, does."""
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert vars(found) == vars(error)
