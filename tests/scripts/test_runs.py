"""Points run from Python give the rows of the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lowvram.config.errors import BadInput
from scripts.benchmarks.runs import Runs
from tests.calls import TINY, Outcome

WORDS = [word for word in TINY if not word.startswith("logger")]


@pytest.mark.slow
def test_a_row_is_that_of_the_command_line(tmp_path: Path, call: Callable[..., Outcome]) -> None:
    with Runs(tmp_path / "runs") as runs:
        row = runs.run("mine", ["debug=measure", *WORDS])
        refused = runs.run("refused", ["precision=tf32", "device=cpu", *WORDS])
        planned = runs.run("planned", ["debug=measure", "ckpt=auto", "vram=4GiB", *WORDS])
    wanted = call("debug=measure", *TINY).row
    assert row["name"] == "mine"
    assert (row["status"], row["loss"], row["memory"]["by_kind"]) == ("ok", wanted["loss"], wanted["memory"]["by_kind"])
    assert row["choices"] == wanted["choices"]
    assert refused["status"] == "incompatible"
    assert (planned["status"], planned["reason"]) == ("ok", None)  # the plan has chosen its blocks


def test_bad_input_is_raised(tmp_path: Path) -> None:
    with Runs(tmp_path) as runs, pytest.raises(BadInput, match=r"train\.steps=0"):
        runs.run("bad", ["train.steps=0"])
