"""Functions in C for the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lowvram.core import native
from lowvram.core.device import c_compiler

SOURCE = """
#include <stdint.h>
void add(float *sums, const float *values, int64_t numel, int64_t threads) {
    for (int64_t i = 0; i < numel; i++) sums[i] += values[i] + (threads > 0 ? 0 : 1);
}
"""
needs_compiler = pytest.mark.skipif(c_compiler() is None, reason="needs a C compiler")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "adder.c"
    path.write_text(SOURCE)
    return path


@needs_compiler
def test_it_computes_with_the_tensors_own_memory(source: Path) -> None:
    sums, values = torch.ones(5), torch.arange(5.0)
    assert native.run(source, "add", sums, values, 4)
    assert sums.tolist() == [1, 2, 3, 4, 1]


def test_tensors_with_gaps_are_left_alone(source: Path) -> None:
    sums = torch.ones(4, 2)[:, 0]
    assert not native.run(source, "add", sums, torch.ones(4), 4)
    assert sums.tolist() == [1, 1, 1, 1]


def test_without_a_compiler_it_says_so_once(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    for _ in range(2):
        assert not native.run(source, "add", torch.ones(2), torch.ones(2), 2)
    said = "".join(capsys.readouterr())
    assert said.count("adder runs without its code in C, many times slower (no C compiler was found)") == 1


@needs_compiler
def test_what_cannot_be_compiled_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = tmp_path / "wrong.c"
    wrong.write_text("int add(")
    assert not native.run(wrong, "add", torch.ones(2), 2)
    assert "couldn't compile it" in "".join(capsys.readouterr())
