"""The user's folder is only read, and a folder of others is read nowhere but in itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from lowvram.config.errors import BadInput, Shortage
from lowvram.data.chat import Chat
from lowvram.data.hub import Hub
from lowvram.data.own_files import check_remote_files
from lowvram.data.spec import TextRules
from tests.data.test_csv_files import rows_of

pytestmark = pytest.mark.usefixtures("datasets_offline")

ROWS = {
    "text": [f"text {number}" for number in range(20)],
    "kind": ["a", "b"] * 10,
    "prompt": ["2+2="] * 20,
    "completion": ["4"] * 20,
}


def state(folder: Path) -> dict[Path, tuple[bytes, int]]:
    return {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in folder.rglob("*") if file.is_file()}


def read_all(folder: Path) -> None:
    """Read the data in every way in which tokens are made of them."""
    Hub(str(folder), text="text", sequence_length=4).read(TextRules(), 0)
    Hub(str(folder), text="text", label="kind", sequence_length=8).read(TextRules(), 0)
    Chat(str(folder), sequence_length=8).read(TextRules(), 0)


def test_a_saved_folder_is_only_read(tmp_path: Path, datasets_offline: Path) -> None:
    whole = Dataset.from_dict(ROWS)
    for name, saved in {"one": whole, "two": DatasetDict({"train": whole, "test": whole.select(range(4, 9))})}.items():
        saved.save_to_disk(str(tmp_path / name))
        before = state(tmp_path / name)
        read_all(tmp_path / name)
        kept = state(datasets_offline / "lowvram")
        read_all(tmp_path / name)
        assert kept
        assert (state(tmp_path / name), state(datasets_offline / "lowvram")) == (before, kept)


def test_a_saved_folder_that_was_written_anew_is_read_anew(tmp_path: Path) -> None:
    Dataset.from_dict(ROWS).save_to_disk(str(tmp_path / "set"))
    first = Hub(str(tmp_path / "set"), text="text", sequence_length=4).read(TextRules(), 0)
    named = (tmp_path / "set" / "state.json").read_text()
    Dataset.from_dict({**ROWS, "text": ["other words"] * 20}).save_to_disk(str(tmp_path / "set"))
    (tmp_path / "set" / "state.json").write_text(named)  # the same fingerprint
    second = Hub(str(tmp_path / "set"), text="text", sequence_length=4).read(TextRules(), 0)
    assert len(first.train) != len(second.train)


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Dataset.from_dict(ROWS).save_to_disk(str(tmp_path / "set"))
    (tmp_path / "file").touch()
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "file")
    with pytest.raises(Shortage, match=r"tokens can't be kept on disk .* HF_DATASETS_CACHE"):
        Hub(str(tmp_path / "set"), text="text", sequence_length=4).read(TextRules(), 0)


def folder_with(tmp_path: Path, card: str, text: str) -> Path:
    """A folder of a stranger, which has files of its own, beside another file of the user's."""
    folder = tmp_path / "stranger"
    (folder / "sub").mkdir(parents=True, exist_ok=True)
    for file in (folder / "train.csv", folder / "sub" / "a.csv", tmp_path / "outside.csv"):
        file.write_text(f"text,kind\n{file.stem},1\n")
    for name in ("README.md", ".huggingface.yaml"):
        (folder / name).unlink(missing_ok=True)
    (folder / card).write_text(f"---\n{text}---\n" if card == "README.md" else text)
    return folder


def test_a_folder_that_names_files_elsewhere_is_refused(tmp_path: Path) -> None:
    places = [
        str(tmp_path / "outside.csv"),
        "../outside.csv",
        "sub/../../*.csv",
        "http://localhost/a.csv",
        "s3://b/a.csv",
    ]
    places += ["simplecache::http://localhost/a.csv", "zip://*.csv::http://localhost/a.zip", "file:///outside.csv"]
    forms = [
        "data_files: '{}'",
        "data_files:\n  - train.csv\n  - '{}'",
        "data_files:\n  - split: train\n    path: '{}'",
        "data_files:\n  - split: train\n    path: [train.csv, '{}']",
    ]
    for number, place in enumerate([*places, *places]):
        text = f"configs:\n- config_name: default\n  {forms[number % len(forms)].format(place)}\n"
        folder = folder_with(tmp_path, ("README.md", ".huggingface.yaml")[number % 3 == 1], text)
        with pytest.raises(BadInput, match=r"data\.name=.*a folder that consists of its own files: its .* names"):
            rows_of(folder)
    folder = folder_with(tmp_path, "README.md", "configs:\n- config_name: default\n  data_dir: ..\n")
    with pytest.raises(BadInput, match=r"README\.md names '\.\.'"):
        rows_of(folder)


def test_a_saved_folder_that_names_files_elsewhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("inside", "outside"):
        Dataset.from_dict({"text": [name] * 9}).save_to_disk(str(tmp_path / name))
    state_file = tmp_path / "inside" / "state.json"
    (data,) = (tmp_path / "outside").glob("*.arrow")
    for place in (f"../outside/{data.name}", str(data)):
        state_file.write_text(json.dumps({**json.loads(state_file.read_text()), "_data_files": [{"filename": place}]}))
        with pytest.raises(BadInput, match=r"a folder that consists of its own files: it names '.*outside/"):
            rows_of(tmp_path / "inside")
        monkeypatch.chdir(tmp_path)
        with pytest.raises(BadInput, match=r"a folder that consists of its own files"):
            rows_of(Path("inside"))
    DatasetDict({"train": Dataset.from_dict(ROWS)}).save_to_disk(str(tmp_path / "parts"))
    (tmp_path / "parts" / "dataset_dict.json").write_text('{"splits": ["train", "../outside"]}')
    with pytest.raises(BadInput, match=r"a folder that consists of its own files: it names '.*outside/"):
        rows_of(tmp_path / "parts")


def test_a_folder_that_names_files_of_its_own_is_read(tmp_path: Path) -> None:
    for place in ("sub/a.csv", "sub/*.csv", "./sub/../sub/a.csv", "**/a.csv"):
        text = f"configs:\n- config_name: default\n  data_files: '{place}'\n"
        assert rows_of(folder_with(tmp_path, "README.md", text)) == [{"text": "a", "kind": "1"}]
    folder = folder_with(tmp_path, "README.md", "configs:\n- config_name: default\n  data_dir: sub\n")
    assert rows_of(folder) == [{"text": "a", "kind": "1"}]
    (tmp_path / "link").symlink_to(folder)
    assert rows_of(tmp_path / "link") == [{"text": "a", "kind": "1"}]


def test_a_readme_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "README.md", "configs: [}\n")
    with pytest.raises(BadInput, match=r"a folder with a readable README\.md \("):
        rows_of(folder)


def test_a_set_of_the_hub_reads_no_files_of_this_machine() -> None:
    own = ["hf://datasets/a/b@1/x.csv", "zip://x.csv::hf://datasets/a/b@1/x.zip"]
    check_remote_files("a/b", {"train": own})
    with pytest.raises(BadInput, match=r"data\.name='a/b': must be .* it names '/home/x\.csv', a file of this machine"):
        check_remote_files("a/b", {"train": own, "test": ["/home/x.csv"]})
