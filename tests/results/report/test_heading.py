"""What a report says it is about: what was swept, when, and the command."""

from __future__ import annotations

from lowvram.results.report.heading import command, date, title
from tests.synthetic import HOSTILE, point


def test_the_title_is_what_was_swept_with_its_values() -> None:
    differing = [{"precision": a, "ckpt": b} for a in ("fp32", "bf16") for b in ("none", "every1")]
    assert title(differing) == "precision fp32, bf16 × ckpt none, every1"
    assert title([{"seed": str(i)} for i in range(9)]) == "seed (9 values)"
    assert (
        title([{name: str(i) for name in "abcdef"} for i in range(2)]) == "a 0, 1 × b 0, 1 × c 0, 1 × d 0, 1 × 2 more"
    )
    assert title([{}, {}]) == ""


def test_the_date_is_that_of_the_first_point() -> None:
    times = ("2026-11-25T08:19:30Z", "2026-11-25T08:10:00Z", None)
    rows = [point(i, {}, provenance={"started": time}) for i, time in enumerate(times)]
    assert date(rows) == "2026-11-25 08:10 UTC"
    later = point(3, {}, provenance={"started": "2026-11-26T00:01:00Z"})
    assert date([*rows, later]) == "2026-11-25 08:10 to 2026-11-26 00:01 UTC"
    assert date([point(0, {})]) == ""


def commanded(*commands: str | None) -> str:
    return command([point(i, {}, provenance={"command": text}) for i, text in enumerate(commands)])


def test_the_command_is_made_of_those_of_the_points() -> None:
    points = [
        f"python train.py mode=measure precision={a} ckpt={b}" for a in ("fp32", "bf16") for b in ("none", "every1")
    ]
    assert commanded(*points) == "python train.py -m mode=measure precision=fp32,bf16 ckpt=none,every1"
    assert commanded("lowvram 'name=a b' seed=0", "lowvram 'name=a b' seed=1") == "lowvram -m 'name=a b' seed=0,1"
    assert commanded("python train.py seed=0") == "python train.py seed=0"
    assert commanded(None, None) == ""
    assert commanded("python train.py seed=0", "lowvram seed=1") == ""


def test_a_command_that_no_shell_can_read_is_shown_all_the_same() -> None:
    assert "\u2028" not in commanded(HOSTILE, "python train.py 'seed=0")
