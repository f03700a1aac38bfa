"""Knobs and loaders with streams of their own train as on the CPU, however late the streams are; and a missing wait is
detected."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.emulated_cuda.mistakes import MISTAKES
from tests.emulated_cuda.races import CASES, TOLERANCE

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.skipif("EMULATED_VALUES" not in os.environ, reason="not the emulated device"),
]
ROOT = Path(__file__).resolve().parents[2]
NUM_SEEDS = 200  # a minute or two
ENOUGH_SEEDS = 40  # all mistakes show within the first twelve


def differences(*words: str) -> list[float]:
    """From the CPU, for each seed, in a process whose streams are late by chance."""
    command = [sys.executable, "-m", "tests.emulated_cuda.races", *words]
    late = {**os.environ, "EMULATED_LATE": "4", "EMULATED_VALUES": "1"}
    done = subprocess.run(command, env=late, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES)
def test_late_streams_change_nothing(case: str, record_property: Callable[[str, object], None]) -> None:
    found = differences(case, str(NUM_SEEDS))
    assert len(found) == NUM_SEEDS
    assert max(found) <= TOLERANCE
    record_property("seeds", len(found))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wait_that_is_left_out_shows(mistake: str) -> None:
    assert differences(MISTAKES[mistake].case, str(ENOUGH_SEEDS), mistake)[-1] > TOLERANCE
