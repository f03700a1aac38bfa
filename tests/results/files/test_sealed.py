"""JSON files with a checksum of themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lowvram.results.files.sealed import Damaged, is_changed, opened, sealed, with_comment
from lowvram.results.row import FILE_NAME, empty_row, merge, read, write

VALUES = {"losses": [1.5, 2.25], "name": "a\u20ac"}


@pytest.mark.parametrize(("indent", "space"), [(None, " "), (1, "\n ")])
def test_it_is_json_and_opens_as_it_was(indent: int | None, space: str) -> None:
    text = sealed(json.dumps(VALUES, indent=indent), space)
    assert json.loads(text) == {**VALUES, "crc32": json.loads(text)["crc32"]}
    assert json.loads(opened(text)) == VALUES


def value_of(text: str) -> float | None:
    """None: it was noticed."""
    try:
        return json.loads(opened(text))["a"]
    except (ValueError, KeyError):
        return None


def test_a_flipped_bit_changes_no_value_unseen() -> None:
    text = sealed(json.dumps({"a": 1.5}))
    for at in range(len(text)):
        for bit in range(7):
            assert value_of(text[:at] + chr(ord(text[at]) ^ 1 << bit) + text[at + 1 :]) in (None, 1.5)
    assert value_of(text.replace("1.5", "2.5")) is None


def test_every_cut_is_seen() -> None:
    text = sealed(json.dumps({"a": 1.5}, indent=1), "\n ")
    assert {value_of(text[:size]) for size in range(len(text) - 2)} == {None}


def test_what_has_none_counts_as_it_is() -> None:
    assert opened('{"a": 1}') == '{"a": 1}'
    with pytest.raises(Damaged, match="checksum"):
        opened('{"a": 1, "crc32": "0123"}')


def test_every_change_of_a_yaml_file_is_seen_but_a_checksum_that_is_gone() -> None:
    text = with_comment("- seed=1\n- logger=none\n")
    first, *rest = text.splitlines(keepends=True)
    assert not is_changed(text)
    assert not is_changed("".join(rest))
    assert is_changed(first + rest[0])
    assert is_changed(first + rest[1])
    assert all(is_changed(text[:size]) for size in range(len(first) - 3, len(text)))
    for at in range(len(first), len(text)):
        assert is_changed(text[:at] + chr(ord(text[at]) ^ 1) + text[at + 1 :])


def test_a_row_whose_digit_has_changed_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, merge(empty_row(), {"id": "x", "loss": {"last": 5.125}}))
    file = tmp_path / FILE_NAME
    assert read(tmp_path) == merge(empty_row(), {"id": "x", "loss": {"last": 5.125}})
    file.write_text(file.read_text().replace("5.125", "4.125"))
    assert read(tmp_path) is None
    assert "its bytes don't match its checksum" in capsys.readouterr().err
