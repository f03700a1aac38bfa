"""The file with the memory of a step is read as it was written; what isn't such a file counts as none."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowvram.results.memory_over_step import FILE_NAME, Moments, read, write


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    write(tmp_path, ["parameters", "activations"], [[0, "forward", 1024, 512], [3, "backward", 1024, 0]])
    assert read(tmp_path) == Moments(
        (0, 3), ("forward", "backward"), {"parameters": (1024, 1024), "activations": (512, 0)}
    )
    header, *_ = (tmp_path / FILE_NAME).read_text().splitlines()
    assert header == "event,phase,parameters_bytes,activations_bytes"


@pytest.mark.parametrize(
    "text", ["", "a,b\n1,2\n", "event,phase,x_bytes\n0,forward\n", "event,phase,x_bytes\n0,f,much\n"]
)
def test_what_is_damaged_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    assert read(tmp_path) is None


def test_without_a_file_there_is_none(tmp_path: Path) -> None:
    assert read(tmp_path) is None
    (tmp_path / FILE_NAME).mkdir()
    assert read(tmp_path) is None
