"""A quotation mark that doesn't enclose a cell is refused with its line: it would join rows. Quoted cells are read."""

from __future__ import annotations

import bz2
import csv
import gzip
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset, DatasetDict, DownloadManager
from datasets.packaged_modules.csv.csv import CsvConfig

from lowvram.config.errors import BadInput
from lowvram.data.splits import SplitSource, read_splits
from tests.data.test_csv_files import rows_of, written

pytestmark = pytest.mark.usefixtures("datasets_offline")

WORDS = ["the", "fox", '5"', "a, b", "a; b", "or | and", "1", '"yes"', "it's", "tab\tbed", "two\nlines", "last\n"]


def text(draw: random.Random, words: list[str]) -> str:
    return " ".join(draw.choices(words, k=draw.randint(2, 8)))


def cells(draw: random.Random, words: list[str]) -> list[dict[str, str]]:
    """Some rows of a text between an index and a label, in any order."""
    columns = draw.sample(["id", "text", "label"], 3)
    makers = {
        "id": lambda number: str(number),
        "text": lambda _: text(draw, words),
        "label": lambda _: draw.choice(["pos", "neg"]),
    }
    return [{name: makers[name](number) for name in columns} for number in range(draw.randint(12, 60))]


def test_quoted_cells_hold_anything(tmp_path: Path) -> None:
    draw = random.Random(20261127)
    for number in range(12):
        rows = cells(draw, WORDS)
        path = tmp_path / f"{number}.{draw.choice(['csv', 'tsv'])}"
        path.write_text(written(rows, draw.choice(",;\t|"), draw.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL])))
        assert rows_of(path) == rows, number
    letters = [{"text": "Dear John,\n" + "so long " * 40_000, "label": "1"}, {"text": "Well, 1\nyes, 2", "label": "0"}]
    (tmp_path / "large.csv").write_text(written(letters * 3, ","))
    assert rows_of(tmp_path / "large.csv") == letters * 3


def stray(draw: random.Random, rows: list[dict[str, str]]) -> int:
    """Put a quotation mark before a text, and perhaps into a later one. Returns the line of the first."""
    first = draw.randrange(len(rows) - 1)
    second = rows[draw.randrange(first + 1, len(rows))]
    rows[first]["text"] = '"' + rows[first]["text"]
    second["text"] = draw.choice(["{}", '"{}', '{}"', 'so "{}" she said', '"']).format(second["text"])
    return first + 2


def test_a_mark_that_joins_rows_is_refused_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(27112026)
    for number in range(40):
        monkeypatch.setattr("lowvram.data.csv_quotes.SAMPLE_ROWS", draw.choice([10, 10_000]))
        rows, separator = cells(draw, ["the", "fox", "said", "hello"]), draw.choice(",;\t|")
        line = stray(draw, rows)
        content = "\n".join(separator.join(row) for row in [list(rows[0]), *(row.values() for row in rows)]) + "\n"
        folder = tmp_path / str(number)
        folder.mkdir()
        kind = draw.choice(["csv", "tsv", "csv.gz", "csv.bz2"]) if separator == "," else "tsv"
        data = content.encode()
        path = folder / f"train.{kind}"
        path.write_bytes({"gz": gzip.compress, "bz2": bz2.compress}.get(kind[4:], bytes)(data))
        with pytest.raises(BadInput, match=rf"data\.name=.*enclose whole cells: of .* the one in line {line} \("):
            rows_of(folder if "." in kind else path, streamed=number % 3 == 0)


def test_files_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(_: DownloadManager, places: list[str]) -> list[str]:
        return [place.replace("hf://datasets/a/b@1", str(tmp_path)) for place in places]

    config: Any = CsvConfig(sep="\t")
    config.data_files = {"train": ["hf://datasets/a/b@1/a.tsv", "hf://datasets/a/b@1/b.tsv"]}
    builder, made = SimpleNamespace(name="csv", config=config), DatasetDict({"train": Dataset.from_dict({"a": ["b"]})})
    monkeypatch.setattr("lowvram.compat.hf_offline.is_reachable", lambda: True)
    monkeypatch.setattr(DownloadManager, "download", download)
    monkeypatch.setattr("datasets.load_dataset_builder", lambda *_, **__: builder)
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: made)
    for name in ("a", "b"):
        (tmp_path / f"{name}.tsv").write_text('text\tlabel\n"Hello ""you"", all"\t1\nthe\t0\n')
    assert read_splits(SplitSource("a/b", None, None, "train", None, None), 1)[0].to_list() == [{"a": "b"}]
    (tmp_path / "b.tsv").write_text('text\tlabel\n"Hello\t1\nthe\t0\nfox"\t1\nthe\t1\n')
    with pytest.raises(BadInput, match=r"data\.name='a/b': .* of .*b\.tsv the one in line 2 \("):
        read_splits(SplitSource("a/b", None, None, "train", None, None), 1)


def test_columns_that_a_readme_names(tmp_path: Path) -> None:
    options = "configs:\n- config_name: default\n  data_files: t.csv\n  sep: '|'\n"
    (tmp_path / "README.md").write_text(f"---\n{options}---\n")
    (tmp_path / "t.csv").write_text('text|label\n"Hello|1\nthe|0\nfox"|1\nthe|1\n')
    with pytest.raises(BadInput, match=r"line 2 \('\"Hello\|1'\) makes one cell of the rows up to line 4"):
        rows_of(tmp_path)
    (tmp_path / "README.md").write_text(f"---\n{options}  quoting: 3\n---\n")
    assert [row["text"] for row in rows_of(tmp_path)] == ['"Hello', "the", 'fox"', "the"]
