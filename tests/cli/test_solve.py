"""mode=solve from the command line: the largest value with which a point fits, and its row."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.calls import TINY, Outcome, read_row

Call = Callable[..., Outcome]
SOLVE = ["mode=solve", *TINY, "solve.key=train.batch_size"]
FOR_CARD = [*SOLVE, "plan.device=rtx3060"]


def planned(call: Call, *words: str) -> bool:
    """Whether a point fits into the memory that it may use."""
    folder = f"planned{len(list(Path().iterdir()))}"
    assert call("mode=plan", *TINY, "plan.device=rtx3060", *words, f"hydra.run.dir={folder}").code == 0
    return read_row(Path(folder))["plan"]["fits"]


@pytest.mark.medium
def test_the_answer_fits_and_the_next_value_does_not(call: Call) -> None:
    outcome = call(*FOR_CARD, "vram=520MiB", "solve.multiple_of=4", "hydra.run.dir=solved")
    assert outcome.code == 0, outcome.said()
    row = read_row(Path("solved"))
    number = row["config"]["train"]["batch_size"]
    assert row["plan"]["solved"] == f"train.batch_size={number}"
    assert row["plan"]["fits"]
    assert row["memory"]["peak_bytes"] is None
    assert f"the largest that fits rtx3060: train.batch_size={number}: the plan needs " in outcome.out
    assert f"of train.batch_size={number + 4} the plan needs " in outcome.out
    assert planned(call, "vram=520MiB", f"train.batch_size={number}")
    assert not planned(call, "vram=520MiB", f"train.batch_size={number + 4}")
    (command,) = [line for line in outcome.out.splitlines() if line.startswith("  ")]
    words = shlex.split(command.split("train.py", 1)[1])
    typed = [word for word in TINY if not word.startswith("train.batch_size")]
    assert words == [*typed, "vram=520MiB", f"train.batch_size={number}"]


@pytest.mark.slow
def test_here_the_answer_is_measured(call: Call) -> None:
    outcome = call(*SOLVE, "device=cpu", "vram=60MiB", "measure.max_seconds=0.5", "hydra.run.dir=solved")
    assert outcome.code == 0, outcome.said()
    row = read_row(Path("solved"))
    assert row["status"] == "ok"
    assert row["choices"]["mode"] == "measure"
    assert row["memory"]["peak_bytes"] == pytest.approx(row["plan"]["allocated_bytes"], rel=0.02)
    (probe,) = Path("solved").glob("*/result.json")
    assert read_row(probe.parent)["name"] == row["plan"]["solved"]


@pytest.mark.slow
def test_cards_stand_in_one_table(call: Call) -> None:
    words = ["-m", *SOLVE, "plan.device=rtx3060,rtx3070", "vram=520MiB,600MiB", "hydra.sweep.dir=solved"]
    outcome = call(*words)
    assert outcome.code == 0, outcome.said()
    table = Path("solved/table.md").read_text().replace("\\", "")
    answers = [read_row(path.parent)["plan"]["solved"] for path in Path("solved").glob("*/result.json")]
    assert len(answers) == 4
    assert "largest" in table
    assert all(answer in table for answer in answers)
    again = call(*words)
    assert again.code == 0
    assert "plan needs" not in again.out  # they are kept


@pytest.mark.medium
def test_a_limit_that_is_no_memory_is_told(call: Call) -> None:
    words = [word for word in TINY if not word.startswith("data.sequence_length")]
    words = ["mode=solve", *words, "solve.key=data.sequence_length", "solve.multiple_of=4", "plan.device=rtx3060"]
    outcome = call(*words, "hydra.run.dir=solved")
    assert outcome.code == 0, outcome.said()
    row = read_row(Path("solved"))
    assert row["plan"]["solved"] == f"data.sequence_length={row['config']['model']['context']}"
    assert re.search(r"data\.sequence_length=\d+: must be at most model\.context=\d+", outcome.out)


@pytest.mark.medium
def test_what_has_no_answer_is_one_sentence(call: Call) -> None:
    outcome = call(*FOR_CARD, "vram=205MiB", "hydra.run.dir=solved")
    assert outcome.code == 3, outcome.said()
    assert read_row(Path("solved"))["status"] == "incompatible"
    assert "train.batch_size: nothing fits: of train.batch_size=1, the smallest that was tried, the plan" in outcome.err
    conflict = call(*FOR_CARD, "accum=x4", "train.batch_size=3", "hydra.run.dir=other")
    assert conflict.code == 3
    assert "train.batch_size=3: must be at least accum.parts=4" in conflict.err


@pytest.mark.medium
def test_a_key_that_saves_memory_is_refused(call: Call) -> None:
    words = [*FOR_CARD, "accum=x4", "solve.key=accum.parts", "train.batch_size=16384"]
    outcome = call(*words, "hydra.run.dir=solved")
    assert outcome.code == 3, outcome.said()
    assert re.search(
        r"solve\.key='accum\.parts': must be .*: accum\.parts=\d+ needs more than accum\.parts=\d+", outcome.err
    )
    assert read_row(Path("solved"))["status"] == "incompatible"


def test_wrong_keys_are_refused(call: Call) -> None:
    for word, sentence in {
        "solve.key=null": "mode=solve needs solve.key: the dotted key of a whole number",
        "solve.key=train.batch_sise": "solve.key='train.batch_sise': must be the dotted key of a whole number",
        "solve.key=model.dropout": "data.image_size or model.num_layers; this one is 0.0",
        "solve.multiple_of=0": "solve.multiple_of=0: must be at least 1",
        "process=inline": "process=inline: must be child with mode=solve",
    }.items():
        assert sentence in call(*FOR_CARD, word).sentence
