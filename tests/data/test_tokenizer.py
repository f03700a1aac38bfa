from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lowvram.compat import hf_offline as reach
from lowvram.config.errors import BadInput
from lowvram.data import tokenizer as tokenizer_module
from lowvram.data.spec import TextRules
from lowvram.data.tokenizer import Bytes, Pretrained, Tokenizer, choose_tokenizer, cut_at_lines
from tests.wordy import save_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="module")
def words(folder: Path) -> Tokenizer:
    return choose_tokenizer(str(folder), TextRules())


def listed(tokens: list[np.ndarray]) -> list[list[int]]:
    return [each.tolist() for each in tokens]


def test_every_byte_is_a_token() -> None:
    assert listed(Bytes().encode(["é", ""])) == [list("é".encode()), []]
    assert listed(Bytes().encode_with_marks(["abc"], 2)) == [[97, 98]]
    assert Bytes().separator.tolist() == [10]


def test_marks_stand_around_a_text_that_is_alone(words: Tokenizer) -> None:
    (the, fox), (bare,) = words.encode(["the fox", "the"])[0].tolist(), words.encode(["the"])[0].tolist()
    assert the == bare
    assert listed(words.encode_with_marks(["the fox", "the"], 8)) == [[2, the, fox, 3], [2, the, 3]]
    assert listed(words.encode_with_marks(["the fox the fox"], 4)) == [[2, the, fox, 3]]
    assert max(the, fox) < words.vocab_size == 4 + 11


def test_texts_in_a_stream_are_parted_by_the_end_token_if_there_is_one(folder: Path, tmp_path: Path) -> None:
    assert choose_tokenizer(str(folder), TextRules()).separator.tolist() == []  # it knows no new line
    ended = choose_tokenizer(str(save_tokenizer(tmp_path / "ended", end="<end>")), TextRules())
    assert ended.separator.tolist() == [4]


def test_a_long_text_is_tokenised_piece_by_piece(words: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "the quick brown fox\n\n" * 50
    whole = words.encode([text])
    monkeypatch.setattr(tokenizer_module, "PIECE_LETTERS", 30)
    monkeypatch.setattr(tokenizer_module, "PIECES", 2)
    assert len(list(cut_at_lines(text))) > 10
    assert "".join(cut_at_lines(text)) == text
    assert listed(words.encode([text])) == listed(whole)


def test_another_tokenizer_has_another_key(folder: Path, tmp_path: Path, words: Tokenizer) -> None:
    words.encode_with_marks(["the quick fox"], 2)  # it keeps how it was called
    again, other = choose_tokenizer(str(folder), TextRules()), save_tokenizer(tmp_path / "other", end="<end>")
    assert again.key == words.key
    assert choose_tokenizer(str(other), TextRules()).key != words.key


def test_auto_is_the_models_own(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(choose_tokenizer("auto", TextRules()), Bytes)
    assert isinstance(choose_tokenizer("auto", TextRules(tokenizer=str(folder))), Pretrained)
    assert capsys.readouterr().out == ""
    assert isinstance(choose_tokenizer("bytes", TextRules(tokenizer=str(folder))), Bytes)
    assert isinstance(choose_tokenizer("auto", TextRules(tokenizer=str(tmp_path))), Bytes)
    said = f"data.tokenizer=auto: there is no tokenizer in {tmp_path}, so every byte is a token\n"
    assert capsys.readouterr().out == said


def test_a_tilde_is_the_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert isinstance(choose_tokenizer(f"~/{folder.name}", TextRules()), Pretrained)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"data\.tokenizer='.*': must be bytes, auto .* has none of tokenizer\.json"):
        choose_tokenizer(str(tmp_path), TextRules())
    with pytest.raises(BadInput, match=r"data\.tokenizer='\./nowhere': must be .*: there is no folder \./nowhere"):
        choose_tokenizer("./nowhere", TextRules())


def test_a_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BadInput, match=rf"data\.tokenizer='auto': must be .* {tmp_path} can't be read \("):
        choose_tokenizer("auto", TextRules(tokenizer=str(tmp_path)))


def test_code_beside_a_tokenizer_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit('it ran')")
    own = '{"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", null]}}'
    (tmp_path / "tokenizer_config.json").write_text(own)
    with pytest.raises(BadInput, match=r"data\.tokenizer=.* can't be read"):
        choose_tokenizer(str(tmp_path), TextRules())


def test_without_the_network_a_name_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr("socket.getaddrinfo", refuse)
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it waited to try again"))
    assert not reach.is_reachable()
    with pytest.raises(BadInput, match=r"data\.tokenizer='somebody/something': must be .* can't be read \("):
        choose_tokenizer("somebody/something", TextRules())


def test_pretrained_weights_need_their_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"^data\.tokenizer='auto': must be bytes, or .* were trained: it has none"):
        choose_tokenizer("auto", TextRules(tokenizer=str(tmp_path), is_trained=True))
    assert isinstance(choose_tokenizer("bytes", TextRules(tokenizer=str(tmp_path), is_trained=True)), Bytes)
