"""scripts/benchmarks/headline_losses.py: the words of its points, and what its page says of rows."""

from __future__ import annotations

import pytest

from lowvram.results.row import MIB, Row, empty_row, merge
from scripts.benchmarks.bench_headline import LOSSES, asked, points_of
from scripts.benchmarks.headline_losses import in_parts, lines


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("", ""),
        ("accum=x32", "accum=x8"),
        ("accum=x4 tile=blocks", "tile=blocks accum=x4"),
        ("model.norm=group accum=x32 accum.parts=128 ckpt=every1", "model.norm=group ckpt=every1 accum=x8"),
        ("accum=x32 accum.parts=6", "accum=x6"),
    ],
)
def test_no_part_is_smaller_than_a_sample(words: str, wanted: str) -> None:
    assert in_parts(words, batch_size=8) == wanted


@pytest.mark.parametrize("case", LOSSES)
def test_the_points_are_those_of_the_preset_from_three_seeds(case: str) -> None:
    words = asked(["scaled", f"case={case}", "train.steps=7"]).words(case)
    assert words[0] == "-m"
    assert "seed=0,1,2" in words
    assert words.index("train.steps=7") > words.index("train.steps=100")
    points = next(word for word in words if word.startswith("hydra.sweeper.points="))
    for name, its_words in points_of(LOSSES[case]).items():
        kept = " ".join(word for word in its_words.split() if not word.startswith("accum"))
        assert f"{name.replace(',', '')}: '{kept}" in points


def row(name: str, seed: int, loss: float, **more: object) -> Row:
    known = {"name": f"{name}-seed{seed}", "status": "ok", "config": {"seed": seed}, "loss": {"eval": loss}}
    return merge(merge(empty_row(), known | {"memory": {"peak_bytes": 2 * MIB}}), more)


def test_seeds_are_held_against_the_band_of_the_reference_before_them() -> None:
    points = {"baseline": "", "one": "accum=x8", "two": "model.norm=batch", "three": "model.norm=batch ckpt=every1"}
    losses = {"baseline": [2.0, 2.2, 2.1], "one": [2.0, 2.3, 2.6], "two": [1.0, 1.1, 1.2], "three": [0.7, 1.1, 1.2]}
    rows = [row(name, seed, loss) for name, own in losses.items() for seed, loss in enumerate(own)]
    table = [line for line in lines(rows, points) if line.startswith("|")][2:]
    assert table == [
        "| baseline | 2.00 | 2.0000, 2.2000, 2.1000 | 2.1000 | 1.9000 to 2.3000 |  |",
        "| one | 2.00 | 2.0000, 2.3000, 2.6000 | 2.3000 | +9.5% | 2 of 3 |",
        "| two | 2.00 | 1.0000, 1.1000, 1.2000 | 1.1000 | 0.9000 to 1.3000 |  |",
        "| three | 2.00 | 0.7000, 1.1000, 1.2000 | 1.0000 | −9.1% | 2 of 3 |",
    ]


def test_a_point_that_failed_or_did_not_run_is_named() -> None:
    rows = [row("baseline", 0, 2.0), row("one", 0, 0.0, status="oom", reason="full")]
    text = "\n".join(lines(rows, {"baseline": "", "one": "accum=x8", "two": "accum=x4"}))
    assert "| one | oom: full |" in text
    assert "| two | not run |" in text
