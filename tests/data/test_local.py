from __future__ import annotations

from pathlib import Path

import pytest

from lowvram.config.errors import BadInput
from lowvram.data.local import escaped, existing_path, is_hidden, quiet_progress, visible_entries


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "texts").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert existing_path("~/texts") == tmp_path / "texts"


@pytest.mark.parametrize("text", ["", "missing", "~no_such_user/x", "a\0b", "x" * 5000])
def test_what_is_not_there_is_named(text: str) -> None:
    with pytest.raises(BadInput, match=r"^data\.path="):
        existing_path(text)


def test_visible_entries(tmp_path: Path) -> None:
    for name in ("b", "a", ".hidden"):
        (tmp_path / name).touch()
    assert visible_entries("x", tmp_path) == [tmp_path / "a", tmp_path / "b"]
    with pytest.raises(BadInput, match=r"data\.path='x': must be readable: .*/a can't be listed \(Not a directory\)"):
        visible_entries("x", tmp_path / "a")


def test_hidden_below_the_root_only() -> None:
    root = Path("/home/.hidden/texts")
    assert not is_hidden(root / "a" / "b.txt", root)
    assert is_hidden(root / ".git" / "b.txt", root)
    assert is_hidden(root / ".b.txt", root)


def test_a_pattern_matches_only_its_path(tmp_path: Path) -> None:
    for name in ("a[1].txt", "a1.txt", "b*.txt", "bb.txt"):
        (tmp_path / name).touch()
    patterns = escaped([tmp_path / "a[1].txt", tmp_path / "b*.txt"])
    found = [[path.name for path in tmp_path.glob(Path(pattern).name)] for pattern in patterns]
    assert found == [["a[1].txt"], ["b*.txt"]]


def test_progress_bars_come_back() -> None:
    import datasets

    assert not datasets.are_progress_bars_disabled()
    with quiet_progress():
        assert datasets.are_progress_bars_disabled()
    assert not datasets.are_progress_bars_disabled()
