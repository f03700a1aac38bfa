"""Cells of csv files are texts as they stand, whatever separates them."""

from __future__ import annotations

import csv
import random
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from lowvram.config.errors import BadInput
from lowvram.data.hub import Hub
from lowvram.data.splits import SplitSource, read_splits
from tests.data.test_hub import all_of

pytestmark = pytest.mark.usefixtures("datasets_offline")

ODD = ["null", "None", "NA", "nan", "N/A", "NULL", "#N/A", "-inf", "true", "False", "007", "1.50", "1e5", "2024-01-01"]
ODD += ["", " ", "a, b", "a; b", "tab\tin it", 'he said "no"', "two\nlines", "é ü 中", "'", "-", "0x1F", "1_000", "+1"]


def rows_of(path: Path, streamed: bool = False) -> list[dict[str, Any]]:
    train, held_out = read_splits(SplitSource(str(path), None, None, "train", None, 1000 if streamed else None), 1000)
    return [*train.to_list(), *(held_out.to_list() if held_out else [])]


def written(rows: list[dict[str, str]], separator: str, quoting: Any = csv.QUOTE_MINIMAL) -> str:
    file = StringIO()
    writer = csv.DictWriter(file, list(rows[0]), delimiter=separator, quoting=quoting, lineterminator="\r\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def test_cells_are_texts_as_they_stand(tmp_path: Path) -> None:
    draw = random.Random(20261127)
    for number in range(24):
        columns = draw.sample(["text", "label", "id", "2", "a b"], draw.randint(2, 4))
        rows = [{column: draw.choice(ODD) for column in columns} for _ in range(draw.randint(1, 80))]
        content = written(rows, draw.choice(",;\t|"), draw.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]))
        if draw.random() < 0.3:
            content = "\ufeff" + content
        path = tmp_path / f"{number}.{draw.choice(['csv', 'tsv'])}"
        path.write_text(content, newline="")
        assert rows_of(path, streamed=number % 4 == 0) == rows, number


def test_one_column_may_hold_anything(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\nhello, you\nnull; void\n007\n")
    assert [row["text"] for row in rows_of(tmp_path / "a.csv")] == ["hello, you", "null; void", "007"]


def test_a_folder_of_files(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    rows = [{"text": text, "label": str(number % 2)} for number, text in enumerate(ODD)]
    for name in ("train", "test"):
        (tmp_path / "set" / f"{name}.csv").write_text(written(rows, ";"), newline="")
    assert rows_of(tmp_path / "set") == rows * 2
    (tmp_path / "set" / "test.csv").write_text(written(rows, ","), newline="")
    with pytest.raises(BadInput, match=r"data\.name=.*: must be files whose cells are separated alike: .* ',' and ';'"):
        rows_of(tmp_path / "set")


def test_rows_longer_than_their_header_are_refused_with_their_number(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\nfine,1\nhello, you,1\n")
    with pytest.raises(BadInput, match=r"a\.csv has 2 there, and 3 in row 1 \('hello, you,1'\): .* needs quotes"):
        rows_of(tmp_path / "a.csv")
    (tmp_path / "b.csv").write_text("text,label\n" + "fine,1\n" * 100 + "hello, you,1\n")
    with pytest.raises(BadInput, match=r"b\.csv'.*Expected 2 fields in line 102, saw 3"):
        rows_of(tmp_path / "b.csv")


def classes(path: Path, labels: list[str]) -> tuple[str, ...] | None:
    path.write_text("text,kind\n" + "".join(f"a b,{label}\n" for label in labels * 3))
    return Hub(str(path), label="kind", sequence_length=8).open(0).spec.class_names


def test_labels_are_texts_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    cases = [["NA", "null"], ["0.0", "1.0"], ["2", "10", "9"], ["01", "1"], ["False", "True"], ["2.5", "-1", "1e1"]]
    ordered = [("NA", "null"), ("0.0", "1.0"), ("2", "9", "10"), ("01", "1"), ("False", "True"), ("-1", "2.5", "1e1")]
    for number, (labels, wanted) in enumerate(zip(cases, ordered, strict=True)):
        assert classes(tmp_path / f"{number}.csv", labels) == wanted
    with pytest.raises(BadInput, match=r"data\.label='kind': must be a column of classes: .* in each row; it has ''"):
        classes(tmp_path / "x.csv", ["a", ""])


def test_floats_that_are_whole_numbers_are_classes(tmp_path: Path) -> None:
    from datasets import Dataset

    Dataset.from_dict({"text": ["a", "b"] * 6, "kind": [0.0, 1.0] * 6}).to_parquet(str(tmp_path / "a.parquet"))
    data = Hub(str(tmp_path / "a.parquet"), label="kind", sequence_length=8).open(0)
    assert data.spec.class_names == ("0", "1")
    assert dict(all_of(data.train)) == {"a": 0, "b": 1}
    Dataset.from_dict({"text": ["a", "b"] * 6, "kind": [0.5, 1.0] * 6}).to_parquet(str(tmp_path / "b.parquet"))
    with pytest.raises(BadInput, match=r"text or whole numbers, in each row; it has 0\.5"):
        Hub(str(tmp_path / "b.parquet"), label="kind", sequence_length=8).open(0)
