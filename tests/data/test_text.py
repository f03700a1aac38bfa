from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from lowvram.config.errors import BadInput
from lowvram.data.source import Data, Samples
from lowvram.data.text import Text
from lowvram.data.tokenizer import Pretrained
from tests.wordy import save_tokenizer

pytestmark = pytest.mark.usefixtures("datasets_offline")

LENGTH = 8


def opened(path: Path | str, **fields) -> Data:
    return Text(str(path), sequence_length=LENGTH, **fields).open(seed=0)


def read(samples: Samples) -> str:
    """All that the samples show, in the order of the text."""
    windows = [bytes(samples.sample(index, 0)[0].tolist()) for index in range(len(samples))]
    return b" ".join(windows).decode(errors="replace")


def test_a_file(tmp_path: Path, token_model) -> None:
    file = tmp_path / "book.txt"
    file.write_text("a" * 900 + "z" * 100)
    data = Text(str(file)).resolve(token_model()).open(seed=0)
    assert (data.spec.num_classes, data.spec.shape) == (256, (32,))
    assert (len(data.train), len(data.eval)) == (899 // 32, 99 // 32)
    assert set(read(data.train)) == {"a", " "}
    assert set(read(data.eval)) == {"z", " "}
    assert str(file) in data.description


def test_a_folder_holds_out_the_end_of_each_file(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    for name, letters in [("__init__.py", "ab"), ("inner/x.md", "cd"), ("long.txt", "ef"), ("empty.txt", "")]:
        (tmp_path / name).write_text(letters[:1] * 180 + letters[1:] * 20)
    data = opened(tmp_path)
    assert set(read(data.train)) == set("ace ")
    assert set(read(data.eval)) == set("bdf ")


def test_the_pattern_chooses_and_hidden_files_stay_out(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "index.txt").write_bytes(b"\xff" * 200)
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    (tmp_path / "a.txt").write_text("a" * 200)
    (tmp_path / "b.md").write_text("b" * 200)
    assert set(read(opened(tmp_path, pattern="**/*.txt").train)) == {"a", " "}
    with pytest.raises(BadInput, match=r"image\.png is not"):
        opened(tmp_path)


@pytest.mark.parametrize("name", ["a=b", "a,b", "a b", "a[1]*?", "über"])
@pytest.mark.parametrize("is_folder", [True, False])
def test_any_name_works(tmp_path: Path, name: str, is_folder: bool) -> None:
    path = tmp_path / name
    if is_folder:
        path.mkdir()
        (path / name).write_text("q" * 200)
    else:
        path.write_text("q" * 200)
    assert set(read(opened(path).train)) == {"q", " "}


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "book.txt").write_text("q" * 200)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(opened("~/book.txt").train)


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_text("a" * 200)
    assert set(read(opened(file).train)) == {"a", " "}
    file.write_text("b" * 200)
    os.utime(file, ns=(1, 1))
    assert set(read(opened(file).train)) == {"b", " "}


def test_reading_leaves_the_files_alone(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_text("a" * 200)
    before = (file.stat().st_mtime_ns, file.read_bytes())
    opened(tmp_path)
    assert (file.stat().st_mtime_ns, file.read_bytes()) == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["book.txt"]


def test_letters_of_several_bytes_are_bytes(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_text("é" * 200)
    inputs, _ = opened(file).train.sample(0, 0)
    assert set(inputs.tolist()) == set("é".encode())


def test_a_sample_is_pure(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_bytes(bytes(range(32, 127)) * 5)
    first, second = opened(file).train, opened(file).train
    assert torch.equal(first.sample(3, 1)[0], second.sample(3, 1)[0])
    assert not torch.equal(first.sample(3, 1)[0], first.sample(3, 2)[0])


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"data\.path='.*/nowhere': must be an existing file or folder"):
        opened(tmp_path / "nowhere")


def test_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"files that match data\.pattern=\*\*/\*"):
        opened(tmp_path)


@pytest.mark.parametrize("text", ["", "short", "a" * (10 * LENGTH + 9)])
def test_too_short_says_how_much_there_is(tmp_path: Path, text: str) -> None:
    (tmp_path / "book.txt").write_text(text)
    held_out = len(text) // 10
    allowed = rf"book\.txt'.* longer: .*, {held_out} bytes in all, .* {LENGTH + 1} \(data\.sequence_length={LENGTH}\)"
    with pytest.raises(BadInput, match=allowed):
        opened(tmp_path / "book.txt")


def test_just_long_enough(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("a" * (10 * LENGTH + 10))
    assert len(opened(tmp_path / "book.txt").eval) == 1


@pytest.mark.parametrize("raw", [b"a" * 500 + b"\xff" + b"a" * 500, b"a" * 500 + "é".encode()[:1]])
def test_not_utf8_names_the_file(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "good.txt").write_text("a" * 200)
    (tmp_path / "latin.txt").write_bytes(raw)
    with pytest.raises(BadInput, match=r"must be text in UTF-8: .*latin\.txt is not"):
        opened(tmp_path)


def test_a_letter_across_two_chunks_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowvram.data.text.CHUNK_BYTES", 3)
    (tmp_path / "book.txt").write_text("é" * 200)
    assert len(opened(tmp_path / "book.txt").train)


@pytest.mark.parametrize("target", ["loop.txt", "gone.txt"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, target: str) -> None:
    (tmp_path / "good.txt").write_text("a" * 200)
    (tmp_path / "loop.txt").symlink_to(tmp_path / target)
    with pytest.raises(BadInput, match=r"readable: .*loop\.txt can't be read"):
        opened(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_named(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("a" * 200)
    (tmp_path / "secret.txt").chmod(0)
    with pytest.raises(BadInput, match=r"secret\.txt can't be read \(Permission denied\)"):
        opened(tmp_path)


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadInput, match=r"made of plain files: .*pipe is something else"):
        opened(tmp_path)


def test_a_file_too_long_for_one_text_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowvram.data.text.MAX_FILE_BYTES", 199)
    (tmp_path / "book.txt").write_text("a" * 200)
    with pytest.raises(BadInput, match=r"at most 199 bytes: split .*book\.txt"):
        opened(tmp_path)


@pytest.mark.parametrize("pattern", ["", "/etc/*", "**x"])
def test_a_bad_pattern_is_named(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(BadInput, match=r"data\.pattern="):
        opened(tmp_path, pattern=pattern)


# Tokenizers


def test_a_tokenizer_makes_the_tokens(tmp_path: Path, token_model) -> None:
    words = save_tokenizer(tmp_path / "words")
    (tmp_path / "texts").mkdir()
    for name in "ab":
        (tmp_path / "texts" / f"{name}.txt").write_text("the fox\n" * 90 + "the dog\n" * 10)
    source = Text(str(tmp_path / "texts"), sequence_length=4, tokenizer=str(words))
    data = source.resolve(token_model()).open(seed=0)
    assert (data.spec.num_classes, data.spec.shape) == (15, (4,))
    assert (len(data.train), len(data.eval)) == (359 // 4, 39 // 4)
    the, fox = data.train.sample(0, 0)[0].unique().tolist()
    assert data.eval.sample(0, 0)[0].unique().tolist() != [the, fox]


def test_tokens_are_kept_until_text_or_tokenizer_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, calls = tmp_path / "book.txt", []
    file.write_text("the fox\n" * 100)
    tokenise = Pretrained.encode

    def counted(self: Pretrained, texts: list[str]) -> list[np.ndarray]:
        calls.extend(text for text in texts if text != "\n")
        return tokenise(self, texts)

    monkeypatch.setattr(Pretrained, "encode", counted)

    def read_with(folder: Path) -> int:
        opened(file, tokenizer=str(folder))
        return len(calls)

    words, others = save_tokenizer(tmp_path / "words"), save_tokenizer(tmp_path / "others", end="<end>")
    assert [read_with(words), read_with(words), read_with(others)] == [1, 1, 2]
    file.write_text("the dog\n" * 100)
    assert read_with(words) == 3


def test_a_text_without_any_token_is_too_short(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(" \n" * 500)
    with pytest.raises(BadInput, match=r"longer: .*, 0 tokens in all"):
        opened(tmp_path / "book.txt", tokenizer=str(save_tokenizer(tmp_path / "words")))
