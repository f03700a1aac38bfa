"""Measured tables of README.md and docs say what their rows say; their maker says what rows that were made up say."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from lowvram.config.identity import ROOT
from lowvram.results import row as rows
from lowvram.results.row import MIB, Row, empty_row, merge
from scripts.benchmarks.book import Book
from scripts.pages import doc_tables
from scripts.pages.doc_tables import RESULTS, main
from scripts.pages.technique_rows import point_words, read

COMMAND = "python train.py -m debug=measure logger=none model=transformer,resnet ckpt=none,every1\n"
WORDS = [f"model={model} ckpt={option}" for model in ("transformer", "resnet") for option in ("none", "every1")]
PAGE = f"""# Title

```bash
{COMMAND}```

A word between.

<!-- grid ckpt: peak / activations -->
<!-- end -->

The end.
"""


def test_the_pages_are_what_their_rows_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().err


def test_the_waterfall_of_the_readme_is_that_of_its_rows() -> None:
    peaks = [row["memory"]["peak_bytes"] / MIB for row in read(RESULTS / "techniques/waterfall_transformer.jsonl").rows]
    told = f"{peaks[0]:.0f} MiB, {peaks[1]:.1f} with plain accumulation, {peaks[-1]:.1f} with all"
    assert told in (ROOT / "README.md").read_text()


def test_how_wrong_plans_are_is_what_the_results_say() -> None:
    found = "".join(path.read_text() for path in RESULTS.parent.glob("*/plan_*.md"))
    lines = re.findall(r"\| (\d+ \| [\d.]+ % \| [\d.]+ % \| [\d.]+ %) \|", (ROOT / "docs/planning.md").read_text())
    assert len(lines) == 25
    assert [line for line in lines if f"| {line.replace(' %', '%')} |" not in found] == []


def kept() -> list[Row]:
    return [row for path in sorted((RESULTS / "docs").glob("*.jsonl")) for row in read(path).rows]


def configuration(row: Row) -> str:
    """What its tensor bytes are a function of."""
    fields = [word for word in point_words(row) if "." in word and not word.startswith("measure.")]
    return " ".join(sorted([*fields, *(f"{group}={option}" for group, option in row["choices"].items())]))


def test_tensor_bytes_repeat() -> None:
    """Of one configuration, whenever it was measured, as docs/measuring.md says."""
    found: dict[str, list[int]] = {}
    for row in kept():
        if row["memory"]["source"] == "tensor_ledger":
            found.setdefault(configuration(row), []).append(row["memory"]["peak_bytes"])
    assert max(map(len, found.values())) > 2
    assert {name: peaks for name, peaks in found.items() if len(set(peaks)) > 1} == {}


def test_what_is_kept_tells_nothing_of_the_machines_folders() -> None:
    texts = [path.read_text() for path in (RESULTS / "docs").iterdir()]
    assert not [text for text in texts if "/home/" in text or "/tmp/" in text or "/work/" in text]


def point(words: str, peak_mib: int, **more: object) -> Row:
    memory = {"peak_bytes": peak_mib * MIB, "by_kind_max": {"activations": peak_mib * MIB // 2}}
    about = {"command": f"python train.py debug=measure {words} logger=none hydra.sweep.dir=/home/somebody/x"}
    where = {"device_name": "A Processor", "torch": "2.13.0", "threads": 1}
    fragment = {"status": "ok", "name": words, "memory": memory, "provenance": {**about, **where}, **more}
    return merge(empty_row(), fragment)


def left(folder: Path, points: Sequence[Row]) -> str:
    for number, row in enumerate(points):
        (folder / str(number)).mkdir(parents=True)
        rows.write(folder / str(number), merge(row, {"index": number}))
    return str(folder)


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A checkout with a page, and a sweep that its commands have left."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("# Nothing measured\n")
    (tmp_path / "docs" / "page.md").write_text(PAGE)
    left(tmp_path / "sweep", [point(words, 10 * (number + 1)) for number, words in enumerate(WORDS)])
    return tmp_path


def call(house: Path, *arguments: str) -> int:
    return main(arguments, house, house / "results")


def text_of(house: Path) -> str:
    return (house / "docs" / "page.md").read_text()


def test_a_grid_has_a_column_for_each_last_word(house: Path) -> None:
    assert call(house, "--check") == 1
    assert call(house, "--keep", "ckpt", str(house / "sweep")) == 0
    wanted = (
        "| peak / activations | `ckpt=none` | `ckpt=every1` |\n|---|---:|---:|\n"
        "| `model=transformer` | 10.0 / 5.0 | 20.0 / 10.0 |\n| `model=resnet` | 30.0 / 15.0 | 40.0 / 20.0 |\n"
    )
    assert text_of(house) == PAGE.replace("<!-- end -->", f"\n{wanted}\n<!-- end -->")
    assert call(house, "--check") == 0
    assert call(house) == 0  # nothing is added a second time
    assert call(house, "--check") == 0
    assert "somebody" not in (house / "results" / "docs" / "ckpt.jsonl").read_text()


def test_a_card_has_a_line_for_each_point_of_its_agenda(house: Path) -> None:
    rows = [
        point(words, peak) | {"time": {"step_ms_p50": 1234.5}}
        for words, peak in (("ckpt=none", 400), ("ckpt=every1", 100))
    ]
    book = Book(house / "card" / "agenda.jsonl")
    (house / "docs" / "page.md").write_text("<!-- card nine: card -->\n<!-- end -->\n")
    assert call(house) == 3  # the card has no such item
    book.add({"key": "nine", "found": [dict(merge(empty_row(), row)) for row in rows]})
    assert call(house) == 0
    assert "| `ckpt=every1` | 0.10 | 4.0 × | 1,234 |" in text_of(house)


def change(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def test_what_differs_is_found(house: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, kept_rows = house / "docs" / "page.md", house / "results" / "docs" / "ckpt.jsonl"
    call(house, "--keep", "ckpt", str(house / "sweep"))
    change(page, "20.0 / 10.0", "20.0 / 9.0")  # a figure typed by hand
    assert call(house, "--check") == 1
    assert "page.md isn't what its rows say" in capsys.readouterr().err
    assert call(house) == 0
    change(kept_rows, f'"peak_bytes": {10 * MIB}', f'"peak_bytes": {11 * MIB}')  # another row
    assert call(house, "--check") == 1
    call(house)
    change(page, "ckpt=none,every1\n", "ckpt=none,every2\n")  # another command
    assert call(house, "--check") == 1
    assert "type --run ckpt" in capsys.readouterr().err


def test_points_have_a_line_each_and_a_dash_for_what_is_not_known(house: Path) -> None:
    change(house / "docs" / "page.md", "grid ckpt: peak / activations", "points ckpt: peak / last loss")
    assert call(house, "--keep", "ckpt", str(house / "sweep")) == 0
    assert "| | peak | last loss |\n" in text_of(house)
    assert "| `model=resnet ckpt=none` | 30.0 | – |\n" in text_of(house)


def test_lowvrams_own_table_names_the_machine(house: Path) -> None:
    change(house / "docs" / "page.md", "grid ckpt: peak / activations", "table ckpt")
    assert call(house, "--keep", "ckpt", str(house / "sweep")) == 0
    assert "| model=resnet ckpt=every1      | ok     |" in text_of(house)
    assert "(A Processor, torch 2.13.0, 1 thread a process.)" in text_of(house)


def test_failures_are_reported_as_they_were(house: Path) -> None:
    change(house / "docs" / "page.md", "grid ckpt: peak / activations", "failures ckpt")
    failed = left(house / "failed", [point("", 1), point("a", 1, status="oom", reason="too large")])
    assert call(house, "--keep", "ckpt", failed) == 0
    assert "```\na: oom: too large\n```" in text_of(house)


def test_an_excerpt_holds_nothing_that_was_not_printed(house: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = house / "docs" / "page.md"
    (house / "results" / "docs").mkdir(parents=True)
    (house / "results" / "docs" / "ckpt.txt").write_text(f"{COMMAND}\none\ntwo\nthree\n")
    change(page, "grid ckpt: peak / activations", "printed ckpt")
    assert call(house) == 0
    assert "```\none\ntwo\nthree\n```" in text_of(house)  # all of it, to be shortened
    change(page, "one\ntwo\nthree", "one\n...\nthree")
    assert call(house, "--check") == 0
    change(page, "one\n...\nthree", "three\none")  # in another order
    assert call(house, "--check") == 1
    change(page, "three\none", "four")
    assert call(house, "--check") == 1
    assert "didn't print this, or not there: four" in capsys.readouterr().err


def test_mistakes_are_one_sentence(house: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(house, "--keep", "nothing", str(house)) == 3
    assert call(house, "--keep", "ckpt", str(house / "docs")) == 3
    change(house / "docs" / "page.md", "peak / activations", "peak / beauty")
    assert call(house, "--keep", "ckpt", str(house / "sweep")) == 3
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in told] == ["no page has a table nothing", "ckpt", "page.md"]


def test_commands_run_as_they_stand_in_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each into a folder of its own, without W&B."""
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
    program.chmod(0o755)
    monkeypatch.setattr(doc_tables.sys, "executable", str(program))
    printed = doc_tables.ran(
        'words="a=1 b=2"\nscripts/train $words\npython train.py \\\n    c=3 logger=none\n', tmp_path
    )
    assert printed.split("\n")[:-1] == [
        *("train.py", "a=1", "b=2", "logger=none", "hydra.run.dir=outputs/1", "hydra.sweep.dir=outputs/1"),
        *("train.py", "c=3", "logger=none", "hydra.run.dir=outputs/2", "hydra.sweep.dir=outputs/2"),
    ]


def test_rows_of_the_bench_of_knobs_are_drawn(house: Path) -> None:
    kinds = {"other": 0, "activations": 50 * MIB}
    plain = {"status": "ok", "step_ms": 10.0, "peak_bytes": 100 * MIB, "process_peak_bytes": 200 * MIB}
    plain |= {"by_kind": kinds, "by_kind_max": kinds}
    found = {**plain, "step_ms": 15.0, "peak_bytes": 75 * MIB, "by_kind_max": {"activations": 25 * MIB}}
    where = {"device_name": "A Processor", "torch": "2.13.0", "threads": 1}
    about = {"model": "model=tiny", "option": "ckpt=every1"}
    line = {**about, "words": "ckpt=every1", "plain": [plain, plain], "machine": where}
    lines = [{**line, "round": 1, "found": found}, {**line, "round": 2, "found": {**found, "step_ms": 20.0}}]
    lines += [{**about, "gradient_error": 1e-7}, {"model": "model=tiny", "option": "", "gradient_error": 2e-7}]
    (house / "results").mkdir()
    (house / "results" / "bench_knobs.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    change(house / "docs" / "page.md", "grid ckpt: peak / activations", "knobs model=tiny")
    assert call(house) == 0
    assert "| baseline | 100.0 | | 0.0% | 200.0 | 1 | 2.0e-07 |\n" in text_of(house)
    assert (
        "| `ckpt=every1` | 100.0 → 75.0 (−25%) | activations 50.0 → 25.0 | 0.0% | 200.0 → 200.0 (+0%) | "
        "1.75 (1.50–2.00) | 1.0e-07 |\n"
    ) in text_of(house)
    assert "(A Processor, torch 2.13.0, 1 thread; 2 rounds.)" in text_of(house)
