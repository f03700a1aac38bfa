from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from datasets import Image as ImageFeature
from PIL import Image

from lowvram.config.errors import BadInput
from lowvram.data.hub import Hub
from lowvram.data.source import Data, Samples
from lowvram.data.spec import DataSpec, Modality, TextRules
from tests.wordy import save_tokenizer

pytestmark = pytest.mark.usefixtures("datasets_offline")

MOODS = [{"text": f"{mood} text number {number}", "mood": mood} for number in range(10) for mood in ("sad", "glad")]


def csv_of(rows: list[dict[str, Any]], path: Path) -> Path:
    Dataset.from_list(rows).to_csv(str(path))
    return path


def opened(path: Path | str, **fields: Any) -> Data:
    return Hub(str(path), **{"sequence_length": 24, **fields}).open(seed=0)


def words(inputs: dict[str, torch.Tensor]) -> str:
    return bytes(inputs["input_ids"][: inputs["attention_mask"].sum()].tolist()).decode()


def all_of(samples: Samples) -> list[tuple[str, int]]:
    return [(words(inputs), int(label)) for inputs, label in (samples.sample(i, 0) for i in range(len(samples)))]


# Kinds of files

SAVERS: dict[str, Callable[[Dataset, str], Any]] = {
    "a.csv": Dataset.to_csv,
    "a.json": Dataset.to_json,
    "a.jsonl": Dataset.to_json,
    "a.parquet": Dataset.to_parquet,
    "saved": Dataset.save_to_disk,
}


@pytest.mark.parametrize("name", SAVERS)
def test_every_kind_of_file(tmp_path: Path, name: str) -> None:
    SAVERS[name](Dataset.from_list(MOODS), str(tmp_path / name))
    data = opened(tmp_path / name, label="mood")
    assert data.spec == DataSpec(Modality.LABELLED_TOKENS, 2, (24,), 256)
    assert data.spec.class_names == ("glad", "sad")
    found = sorted([*all_of(data.train), *all_of(data.eval)])
    assert found == sorted((row["text"], int(row["mood"] == "sad")) for row in MOODS)


def test_lines_of_a_text_file_are_read_as_they_stand(tmp_path: Path) -> None:
    lines = [f"line {number}" for number in range(100)]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    data = opened(tmp_path / "a.txt")
    assert data.spec == DataSpec(Modality.TOKENS, 256, (24,))
    held_out = [bytes(data.eval.sample(index, 0)[0].tolist()).decode() for index in range(len(data.eval))]
    assert "".join(held_out).startswith("line 90\nline 91\nline 92")


@pytest.mark.parametrize("name", ["train/x.csv validation/x.csv", "train.csv validation.csv", "train/x.csv test/x.csv"])
def test_splits_of_a_folder(tmp_path: Path, name: str) -> None:
    for place, rows in zip(name.split(), (MOODS[:14], MOODS[14:]), strict=True):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        csv_of(rows, tmp_path / place)
    data = opened(tmp_path, label="mood", eval_samples=4)
    assert [text for text, _ in all_of(data.train)] == [row["text"] for row in MOODS[:14]]
    assert len(data.eval) == 4
    assert {text for text, _ in all_of(data.eval)} <= {row["text"] for row in MOODS[14:]}


def test_splits_by_name(tmp_path: Path) -> None:
    parts: Any = {"small": Dataset.from_list(MOODS[:4]), "large": Dataset.from_list(MOODS)}
    DatasetDict(parts).save_to_disk(str(tmp_path))
    data = opened(tmp_path, label="mood", train_split="large", eval_split="small")
    assert (len(data.train), len(data.eval)) == (20, 4)
    with pytest.raises(BadInput, match=r"data\.train_split='train': must be one of the splits: small, large"):
        opened(tmp_path)
    with pytest.raises(BadInput, match=r"data\.eval_split='tiny': must be one of the splits: small, large"):
        opened(tmp_path, train_split="large", eval_split="tiny")


# Classes


def test_a_tenth_of_each_class_is_held_out(tmp_path: Path) -> None:
    data = opened(csv_of(sorted(MOODS, key=lambda row: row["mood"]), tmp_path / "a.csv"), label="mood")
    assert sorted(label for _, label in all_of(data.eval)) == [0, 1]
    assert not {text for text, _ in all_of(data.train)} & {text for text, _ in all_of(data.eval)}


def test_whole_numbers_are_classes_in_their_order(tmp_path: Path) -> None:
    rows = [{"text": f"{stars} stars", "stars": stars} for stars in (10, 2, 7) for _ in range(3)]
    data = opened(csv_of(rows, tmp_path / "a.csv"), label="stars", text="text")
    assert data.spec.num_classes == 3
    assert data.spec.class_names == ("2", "7", "10")
    assert {*all_of(data.train), *all_of(data.eval)} == {("2 stars", 0), ("7 stars", 1), ("10 stars", 2)}


def test_a_class_label_has_an_order_of_its_own(tmp_path: Path) -> None:
    features = Features({"text": Value("string"), "mood": ClassLabel(names=["sad", "glad", "never"])})
    Dataset.from_list(MOODS, features=features).save_to_disk(str(tmp_path))
    data = opened(tmp_path, label="mood")
    assert data.spec.class_names == ("sad", "glad", "never")
    assert {label for text, label in all_of(data.train) if text.startswith("sad")} == {0}


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ([0.5, 1.5, 0.5], r"a column of classes: text or whole numbers, in each row; it has 0\.5, 1\.5"),
        (["a", None, "b"], r"in each row; it has None"),
        ([2.0**70, 1.0, 2.0], r"in each row; it has 1180591620717411303424"),
        (["a", "a", "a"], r"at least 2 classes; it has only 'a'"),
    ],
)
def test_what_is_no_class_is_refused(tmp_path: Path, column: list[Any], said: str) -> None:
    Dataset.from_dict({"text": ["x", "y", "z"], "mood": column}).to_parquet(str(tmp_path / "a.parquet"))
    with pytest.raises(BadInput, match=rf"data\.label='mood': must be .*{said}"):
        opened(tmp_path / "a.parquet", label="mood")


def test_labels_of_several_kinds_are_refused(tmp_path: Path) -> None:
    for number, kinds in enumerate(([1, "a"], [True, "a"], [[1], "a"], [[1], [2]], [{"a": 1}, {"a": 2}])):
        path = tmp_path / f"{number}.jsonl"
        path.write_text("".join(f"{json.dumps({'text': 'x', 'kind': kind})}\n" for kind in kinds * 4))
        with pytest.raises(BadInput, match=r"data\.(label='kind': must be a column of classes; it is|name=)"):
            opened(path, label="kind")
    (tmp_path / "set").mkdir()
    for name, kinds in {"train": ["a", "b"], "test": [["a"], ["b"]]}.items():
        rows = [{"text": "x", "kind": kind} for kind in kinds * 4]
        Dataset.from_list(rows).to_parquet(str(tmp_path / "set" / f"{name}.parquet"))
    with pytest.raises(BadInput, match=r"data\.(label='kind': must be a column of the same type in all splits|name=)"):
        opened(tmp_path / "set", label="kind")


def test_labels_outside_the_classes_are_refused(tmp_path: Path) -> None:
    csv_of(MOODS, tmp_path / "train.csv")
    csv_of([*MOODS, {"text": "x", "mood": "odd"}], tmp_path / "test.csv")
    with pytest.raises(BadInput, match=r"all among the 2 classes to train on: the held-out split has 'odd'"):
        opened(tmp_path, label="mood")


def test_numbers_outside_a_class_label_are_refused(tmp_path: Path) -> None:
    features = Features({"text": Value("string"), "mood": ClassLabel(names=["sad", "glad"])})
    table = Dataset.from_dict({"text": ["a", "b"], "mood": [0, -1]}, features=features)
    table.save_to_disk(str(tmp_path))
    with pytest.raises(BadInput, match=r"among the 2 classes to train on: train has -1"):
        opened(tmp_path, label="mood")


# Columns


def test_a_json_column_whose_texts_are_all_dates_is_told_with_what_to_do(tmp_path: Path) -> None:
    """`datasets` makes times of them, and what stood there is gone; csv and parquet keep it."""
    days = [f"2024-{1 + number % 12:02}-{1 + number % 28:02}" for number in range(40)]
    rows = [{"day": day, "part": day[:7], "stars": number % 2} for number, day in enumerate(days)]
    path = tmp_path / "a.jsonl"
    told = r".*Value\('timestamp.*csv or parquet"
    for ending in ("", "T10:00:00"):
        path.write_text("\n".join(json.dumps({**row, "day": row["day"] + ending}) for row in rows))
        with pytest.raises(BadInput, match=rf"data\.text='day': must be a column of texts; it is{told}"):
            opened(path, text="day", label="stars")
        with pytest.raises(BadInput, match=rf"data\.label='day': must be a column of classes; it is{told}"):
            opened(path, text="part", label="day")
    path.write_text("\n".join(json.dumps({"day": row["day"], "stars": row["stars"]}) for row in rows))
    with pytest.raises(BadInput, match=rf"data\.text=null: must be one of the columns: day, stars; day is{told}"):
        opened(path, label="stars")
    Dataset.from_list(rows).to_parquet(str(tmp_path / "a.parquet"))
    for kept in (csv_of(rows, tmp_path / "a.csv"), tmp_path / "a.parquet"):
        opened(kept, text="day", label="stars")


def test_columns_that_are_not_there_are_named(tmp_path: Path) -> None:
    path = csv_of([{"title": "a", "body": "b", "stars": 1}] * 3, tmp_path / "a.csv")
    with pytest.raises(BadInput, match=r"data\.label='mood': must be one of the columns: title, body, stars"):
        opened(path, label="mood")
    with pytest.raises(BadInput, match=r"data\.text='tilte': must be one of the columns: title, body, stars"):
        opened(path, text="tilte")
    with pytest.raises(BadInput, match=r"data\.text=null: must be one of the columns: title, body, stars"):
        opened(path)
    numbers = tmp_path / "a.json"
    Dataset.from_list([{"stars": 1}] * 3).to_json(str(numbers))
    with pytest.raises(BadInput, match=r"data\.text='stars': must be a column of texts; it is Value\('int64'\)"):
        opened(numbers, text="stars")
    starred = tmp_path / "b.json"
    Dataset.from_list([{"stars": 1, "kind": kind} for kind in "aabb"]).to_json(str(starred))
    with pytest.raises(BadInput, match=r"data\.image='stars': must be a column of images, .*int64"):
        opened(starred, image="stars", label="kind", image_size=8)


def test_the_only_column_of_texts_need_not_be_named(tmp_path: Path) -> None:
    rows = [{"id": number, "review": row["text"], "mood": row["mood"]} for number, row in enumerate(MOODS)]
    assert all_of(opened(csv_of(rows, tmp_path / "a.csv"), label="mood").train)[0] == (MOODS[0]["text"], 1)


def test_an_empty_text_is_a_text(tmp_path: Path) -> None:
    rows = [{"text": text, "mood": mood} for text in ("", None, "x") for mood in ("a", "b") for _ in range(2)]
    Dataset.from_list(rows).to_parquet(str(tmp_path / "a.parquet"))
    assert {text for text, _ in all_of(opened(tmp_path / "a.parquet", label="mood").train)} == {"", "x"}


# Tokens


def test_a_tokenizer_frames_each_text_and_the_model_fills_it_up(tmp_path: Path, classifier_of_texts) -> None:
    folder = save_tokenizer(tmp_path / "words")
    rows = [
        {"text": text, "kind": text[:3]} for text in ("the fox", "the quick fox jumps", "dog", "lazy") for _ in "ab"
    ]
    path = csv_of(rows, tmp_path / "a.csv")
    model = classifier_of_texts(text_rules=TextRules(pad_id=9, is_pad_fixed=True, tokenizer=str(folder)))
    data = Hub(str(path), label="kind", sequence_length=5).resolve(model).open(seed=0)
    assert data.spec == DataSpec(Modality.LABELLED_TOKENS, 3, (5,), 15)
    found = {tuple(data.train.sample(index, 0)[0]["input_ids"].tolist()) for index in range(len(data.train))}
    assert {(ids[0], ids[-1]) for ids in found} == {(2, 9), (2, 3)}  # filled up, or cut


def test_texts_in_a_stream_are_parted(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "words", end="<end>")
    path = csv_of([{"text": "fox"}] * 40, tmp_path / "a.csv")
    inputs, targets = opened(path, tokenizer=str(folder), sequence_length=3).train.sample(0, 0)
    tokens = {*inputs.tolist(), int(targets[-1])}
    assert (len(tokens), 4 in tokens) == (2, True)
    assert all(token != after for token, after in zip(inputs.tolist(), targets.tolist(), strict=True))


def test_too_short(tmp_path: Path) -> None:
    path = csv_of([{"text": "abcdefghij"}] * 10, tmp_path / "a.csv")
    allowed = r"longer: it has 99 bytes to train on and 11 held out, and one sample takes 12 of each"
    with pytest.raises(BadInput, match=allowed):
        opened(path, sequence_length=11)
    assert len(opened(path, sequence_length=10).eval) == 1


# Images


def make_images(folder: Path) -> list[dict[str, str]]:
    for name, colour in {"red": (200, 30, 30), "blue": (30, 30, 200)}.items():
        for number in range(4):
            Image.new("RGB", (20, 16 + number), colour).save(folder / f"{name}{number}.png")
    return [{"file": path.name, "kind": path.stem[:-1]} for path in sorted(folder.glob("*.png"))]


@pytest.mark.parametrize("kind", ["bytes", "paths"])
def test_images(tmp_path: Path, image_model, kind: str) -> None:
    rows = make_images(tmp_path)
    path = csv_of(rows, tmp_path / "a.csv")
    if kind == "bytes":
        stored = [{**row, "file": {"bytes": (tmp_path / row["file"]).read_bytes(), "path": None}} for row in rows]
        path = tmp_path / "a.parquet"
        Dataset.from_list(stored).cast_column("file", ImageFeature()).to_parquet(str(path))
    data = Hub(str(path), image="file", label="kind").resolve(image_model()).open(seed=0)
    assert data.spec == DataSpec(Modality.IMAGES, 2, (3, 24, 24))
    assert data.spec.class_names == ("blue", "red")
    assert (len(data.train), len(data.eval)) == (6, 2)
    for samples in (data.train, data.eval):
        image, label = samples.sample(0, 0)
        assert (image.shape, image.dtype) == ((3, 24, 24), torch.float32)
        assert bool(image[0].mean() > image[2].mean()) == bool(label == 1)


def test_a_broken_image_is_named_by_its_row(tmp_path: Path) -> None:
    rows = make_images(tmp_path)
    data = opened(csv_of(rows, tmp_path / "a.csv"), image="file", label="kind", image_size=8)
    for row in rows:
        (tmp_path / row["file"]).write_text("no image")
    with pytest.raises(RuntimeError, match=r"the image in row \d can't be decoded"):
        data.train.sample(0, 0)


def test_images_need_classes() -> None:
    with pytest.raises(BadInput, match=r"data\.label=null: must be the column of the images' classes"):
        Hub("x", image="file")
    with pytest.raises(BadInput, match=r"data\.text='text': must be null where data\.image is given"):
        Hub("x", image="file", label="kind", text="text")


# Streams


def test_of_a_stream_the_first_samples_are_read(tmp_path: Path) -> None:
    Dataset.from_list(MOODS).to_parquet(str(tmp_path / "a.parquet"))  # of csv files datasets leaves streams open
    data = opened(tmp_path / "a.parquet", label="mood", streaming=True, buffer_samples=12)
    assert len(data.train) + len(data.eval) == 12
    assert {text for text, _ in all_of(data.train)} < {row["text"] for row in MOODS[:12]}


def test_a_stream_of_images_and_its_own_held_out_split(tmp_path: Path) -> None:
    rows = [{**row, "file": str(tmp_path / row["file"])} for row in make_images(tmp_path)]
    table = Dataset.from_list(rows).cast_column("file", ImageFeature())
    DatasetDict({"train": table, "test": table}).save_to_disk(str(tmp_path / "saved"))
    streamed = {"streaming": True, "buffer_samples": 7, "eval_samples": 3}
    data = opened(tmp_path / "saved", image="file", label="kind", image_size=8, **streamed)
    assert (len(data.train), data.train.sample(0, 0)[0].shape) == (7, (3, 8, 8))


# What fits, and what is not there


def test_the_kind_of_samples_follows_from_the_columns(token_model, image_model, classifier_of_texts) -> None:
    with pytest.raises(BadInput, match=r"data='hub': must be a source of tokens"):
        Hub("x", label="mood").resolve(token_model())
    with pytest.raises(BadInput, match=r"data='hub': must be a source of labelled tokens, .*hub \(with data\.label\)"):
        Hub("x").resolve(classifier_of_texts())
    with pytest.raises(BadInput, match=r"data='hub': must be a source of images, .*hub \(with data\.image\)"):
        Hub("x", label="mood").resolve(image_model())


def test_files_that_are_not_there_or_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"data\.name='\./nowhere\.csv': must be a file .*; nothing is there"):
        opened("./nowhere.csv")
    (tmp_path / "a.docx").write_text("x")
    with pytest.raises(
        BadInput, match=r"data\.name='.*a\.docx': must be a file \(\.csv, .*\) .*: \.docx can't be read"
    ):
        opened(tmp_path / "a.docx")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match=r"data\.name='.*empty': must be a file .*doesn't contain any data files"):
        opened(tmp_path / "empty")
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(BadInput, match=r"data\.name='.*a\.json': must be a file .*\("):
        opened(tmp_path / "a.json")
    (tmp_path / "[1]").mkdir()
    with pytest.raises(BadInput, match=r"data\.name='.*\[1\]': must be a folder whose path has none of"):
        opened(tmp_path / "[1]")


def test_any_name_of_a_file_works(tmp_path: Path) -> None:
    assert len(opened(csv_of(MOODS, tmp_path / "a=b, [1]*?.csv"), label="mood").train) == 18


@pytest.mark.parametrize("streaming", [False, True])
def test_without_the_network_a_name_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, streaming: bool) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr("socket.getaddrinfo", refuse)
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it waited to try again"))
    named = r"data\.name='somebody/something': must be a file \(.*, or the name of .*`hf download .*reach"
    with pytest.raises(BadInput, match=named):
        opened("somebody/something", streaming=streaming)
