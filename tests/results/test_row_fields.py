"""What isn't a row counts as none, and is named; what is one can be shown, whatever its texts are."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lowvram.results import table
from lowvram.results.columns import value_at
from lowvram.results.loggers.wandb_sweep import columns
from lowvram.results.report.data import entries
from lowvram.results.report.report import save
from lowvram.results.row import exit_code, is_final, read
from lowvram.results.shown import shown
from lowvram.results.terminal import LiveProgress, QuietProgress, summary
from tests.synthetic import failed, leave, point

WRONG = ["many", -5, 10**400, True, [], ["x"], {}, {"a": "x"}, None]
REPORTED = {
    "status": ("great", "status='great': must be one of error, incompatible, "),
    "schema": (7, "schema=7: must be 1"),
    "memory": (None, "memory=None: must be keys with values"),
    "time": ({"step_ms_p50": "fast"}, "time.step_ms_p50='fast': must be a number"),
    "index": ("first\x1b[2J", r"index='first\x1b[2J': must be a number"),
    "reruns": ([5], "reruns=[5]: must be a list of keys with values"),
}


def full() -> dict[str, Any]:
    """A row in which all is known that a view reads."""
    row = point(0, {"mode": "measure"})
    row["plan"] = {"allocated_bytes": 5, "step_ms": 3.0, "fits": True, "by_kind": {"inputs": 5}, "reason": None}
    row["fidelity"] = {"gradient_error": 1e-3, "gradient_cosine": 1.0, "loss_gap": 0.1, "steps": 5, "reason": None}
    row["reruns"] = [{"step_ms_p50": 3.0, "reason": None, "status": "ok", "disturbed": "yes"}]
    row["attempts"] = [{"parts": 2}]
    row["config"] = {"train": {"batch_size": 4, "steps": 8}, "accum": {"parts": 4}, "vram": None, "seed": 0}
    return row


def paths(node: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, value in inner:
        yield (*above, name)
        yield from paths(value, (*above, name))


def with_value(row: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed = json.loads(json.dumps(row))
    node = changed
    for name in path[:-1]:
        node = node[name]
    node[path[-1]] = value
    return changed


def look(folder: Path) -> None:
    """Have all views made."""
    rows = table.collect(folder)
    if rows:
        table.save(folder, rows)
        table.render(rows)
        columns(rows)
        exit_code([row for row in rows if row["status"]], sweep=True)
        assert all(is_final(row) in (True, False) for row in rows)
        save(folder)


@pytest.mark.parametrize("key", REPORTED)
def test_what_is_no_row_is_named_once_and_counts_as_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    value, expected = REPORTED[key]
    leave(tmp_path, [point(0, {}), point(1, {})])
    file = sorted(tmp_path.glob("*/result.json"))[0]
    stored = json.loads(file.read_text())
    del stored["crc32"]  # as whoever edits one by hand
    file.write_text(json.dumps(stored | {key: value}))
    look(tmp_path)
    assert len(table.collect(tmp_path)) == 1
    assert file.is_file()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{file} is ignored, as it was damaged, or isn't a row that lowvram wrote: {expected}")


@pytest.mark.parametrize("text", ["", "{", "[]", "5", "[" * 100_000, '{"schema": 1', "\0", None])
def test_a_file_that_is_no_json_or_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None
) -> None:
    if text is None:
        (tmp_path / "result.json").mkdir()
    else:
        (tmp_path / "result.json").write_text(text)
    assert read(tmp_path) is None
    assert read(tmp_path) is None
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.slow
def test_a_row_with_anything_in_any_place_ends_no_view(tmp_path: Path) -> None:
    leave(tmp_path, [full(), point(1, {}), failed(2, "error", "x")])
    file = next(path for path in tmp_path.glob("*/result.json") if json.loads(path.read_text())["attempts"])
    whole = json.loads(file.read_text())
    look(tmp_path)
    assert len(table.collect(tmp_path)) == 3
    for number, path in enumerate(paths(whole)):
        for value in (WRONG[number % len(WRONG)], WRONG[(number * 5 + 2) % len(WRONG)]):
            file.write_text(json.dumps(with_value(whole, path, value)))
            look(tmp_path)


def test_what_is_no_number_counts_as_none() -> None:
    """In a configuration, which isn't checked in all its places."""
    for value in ("../../x", [1], {"a": 1}, None, float("nan")):
        assert value_at({"config": {"train": {"steps": value}}}, "config.train.steps") is None
    assert value_at({"config": {"train": {"steps": 8}}}, "config.train.steps") == 8


HOSTILE = {
    "two\nlines": r"two\nlines",
    "\x1b[2J\x1b]0;title\x07": r"\x1b[2J\x1b]0;title\x07",
    "back\rover": r"back\rover",
    "\u202etxt.exe\x9b": r"\u202etxt.exe\x9b",
}


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_leaves_its_line(tmp_path: Path, text: str) -> None:
    """Names, reasons and commands come from anywhere."""
    row = failed(0, "error", text, name=text, disturbed=text, provenance={"command": text})
    folder = leave(tmp_path, [row, failed(1, "error", text, name=text)])
    look(folder)
    made = [(folder / name).read_text() for name in ("table.md", "table.csv", "report.html")]
    rows = table.collect(folder)
    for shown_text in (*made, table.render(rows), *summary(rows[0]), json.dumps(columns(rows))):
        assert text not in shown_text
        assert text.replace("\n", " ") == text or "\x1b" not in shown_text
    assert HOSTILE[text] in table.render(rows).replace("|", "")
    assert HOSTILE[text] in summary(rows[0])[0]
    assert entries([folder])[0].row["name"] == text  # only what is shown is changed


@pytest.mark.parametrize("text", HOSTILE)
def test_what_is_said_is_a_line(text: str) -> None:
    for kind in (LiveProgress, QuietProgress):
        stream = io.StringIO()
        kind(stream).say(f"x{text}")
        assert stream.getvalue() == (f"x{HOSTILE[text]}\n" if "\r" not in text else "over\n")


def test_a_spreadsheet_runs_nothing_and_numbers_stay_numbers(tmp_path: Path) -> None:
    names = ["=cmd()", "+1+1", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "plain", '=HYPERLINK("x")']
    folder = leave(tmp_path, [point(index, {}, name=name) for index, name in enumerate(names)])
    rows = table.collect(folder)
    rows[0]["loss"]["last"] = -0.5
    table.save(folder, rows)
    with (folder / "table.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["name"] for line in lines] == [
        "'=cmd()", "'+1+1", "'-2+3", "'@SUM(A1)", "'\t=1", r"\r=1", "plain", "'=HYPERLINK(\"x\")",
    ]  # fmt: skip
    assert lines[0]["last_loss"] == "-0.5"


def test_text_that_can_be_shown_stays() -> None:
    assert shown("größe\t5 → 6 'x' \\n 🙂") == "größe\t5 → 6 'x' \\n 🙂"
