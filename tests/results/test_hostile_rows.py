"""Rows of others may hold anything: what is printed or saved from them holds no escapes, marks of direction or HTML."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from lowvram.results.report import report
from lowvram.results.row import FILE_NAME, empty_row, merge
from lowvram.results.table import collect, render, save
from lowvram.results.terminal import summary

HOSTILE = (
    *("\x1b]0;owned\x07", "\x9b31m", "\u202egnp.exe", "\u2066x", "\u061cx", "a\u200bb", "\ud800", "\ufeff"),
    *("\U000e0041", "<img src=x onerror=alert(1)>", "</script><script>alert(1)</script>"),
    *("[f](javascript:alert(1))", "`|`*_", "\n# x", "{", "}", "{0}", "{unit", "{unit}", "{unit.__class__}", "%s%n"),
    *("$(id)", "=cmd|' /C calc'!A0", "@SUM(1)", "a.b", "", "\x00", "\r", "x" * 10_000, "loss", "__proto__"),
)
RAW = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff\U000e0041]"
)


def hostile_row(chosen: random.Random, number: int) -> dict[str, Any]:
    """A row with hostile names of scores, choices and values, and texts wherever a row has some."""

    def text() -> str:
        return "".join(chosen.choices(HOSTILE, k=chosen.randint(1, 3)))

    names = chosen.sample(HOSTILE, 6)
    row = merge(empty_row(), {"id": text(), "name": text(), "index": number, "status": "ok", "reason": text()})
    row["eval"] |= {name: chosen.random() for name in names}
    row["choices"] = {"model": text(), **{name: text() for name in names[:2]}}
    row["config"] = {"train": {"batch_size": 1}, "accum": {"parts": 1}, **{name: {text(): text()} for name in names}}
    for section, name in (("provenance", "git_sha"), ("provenance", "command"), ("provenance", "device_name")):
        row[section][name] = text()
    row["provenance"]["dirty"], row["disturbed"], row["semantics_changed"] = True, text(), text()
    row["memory"]["peak_bytes"] = row["loss"]["eval"] = number + 1.0
    return row


@pytest.mark.parametrize("seed", range(3))
def test_nothing_of_a_row_is_written_raw(tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = random.Random(20261127 + seed)
    for number in range(6):
        row = hostile_row(chosen, number)
        (tmp_path / f"point{number}").mkdir()
        (tmp_path / f"point{number}" / FILE_NAME).write_text(json.dumps(row))
    rows = collect(tmp_path)
    assert len(rows) == 6, capsys.readouterr().err
    save(tmp_path, rows)
    report.save(tmp_path)
    printed = render(rows) + "".join("\n".join(summary(row, tmp_path)) for row in rows)
    written = [(tmp_path / name).read_text(encoding="utf-8") for name in ("table.md", "table.csv", "rows.jsonl")]
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    for text in (printed, *written, page):
        assert not RAW.search(text), repr(RAW.search(text))
    assert not re.search(r"(?<!\\)<(img|script)|(?<!\\)\]\(", written[0])
    assert page.lower().count("<script") == page.lower().count("</script>") == 2
    assert "<img" not in page
    assert not re.search(r"^[=@+]|,[=@+]", written[1], re.MULTILINE)


@pytest.mark.parametrize("value", ["text", [1], {}, True, 10**400])
def test_a_score_that_is_no_number_is_no_row(tmp_path: Path, value: Any, capsys: pytest.CaptureFixture[str]) -> None:
    row = merge(empty_row(), {"status": "ok"})
    row["eval"]["mine"] = value
    (tmp_path / FILE_NAME).write_text(json.dumps(row))
    assert collect(tmp_path) == []
    assert "eval.mine=" in capsys.readouterr().err
