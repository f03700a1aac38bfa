from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import torch

from lowvram.config.errors import BadInput
from lowvram.data.python_source import PythonSource, is_held_out, library_files, read


def test_the_library_holds_neither_tests_nor_packages() -> None:
    names = list(library_files())
    assert names == sorted(names)
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "site-packages", "dist-packages", "idle_test"}


def test_a_tenth_of_the_files_is_held_out() -> None:
    names = list(library_files())
    assert 0.05 < sum(map(is_held_out, names)) / len(names) < 0.2


def test_reading_ends_at_max_bytes(tmp_path: Path) -> None:
    files = [tmp_path / name for name in "abc"]
    for file in files:
        file.write_text(file.name * 4)
    assert [bytes(read(size, files).read(0, min(size, 12))) for size in (3, 4, 6, 99)] == [
        b"aaa",
        b"aaaa",
        b"aaaabb",
        b"aaaabbbbcccc",
    ]


def test_open(token_model) -> None:
    data = PythonSource(max_bytes=1_000_000, eval_samples=9).resolve(token_model()).open(seed=0)
    assert (data.spec.num_classes, data.spec.shape, len(data.eval)) == (256, (32,), 9)
    inputs, targets = data.train.sample(5, epoch=0)
    assert torch.equal(inputs[1:], targets[:-1])


def test_train_and_eval_are_different_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    names = [f"module_{number}.py" for number in range(60)]
    for name in names:
        (tmp_path / name).write_text(("h" if is_held_out(name) else "t") * 40)
    data = PythonSource(sequence_length=8).open(seed=0)
    assert 0 < len(data.eval) < len(data.train)
    for samples, letter in [(data.train, "t"), (data.eval, "h")]:
        seen = torch.cat([samples.sample(index, epoch=3)[1] for index in range(len(samples))])
        assert set(bytes(seen.tolist()).decode()) == {letter}


def test_a_sample_is_pure(token_model) -> None:
    first, second = (PythonSource(sequence_length=32, max_bytes=20_000).open(seed=7).train for _ in range(2))
    assert torch.equal(first.sample(11, 2)[0], second.sample(11, 2)[0])
    assert not torch.equal(first.sample(11, 2)[0], first.sample(11, 3)[0])


def test_too_few_bytes_say_both_numbers() -> None:
    with pytest.raises(BadInput, match=r"data\.max_bytes=3000: must be enough for data\.sequence_length=5000"):
        PythonSource(sequence_length=5000, max_bytes=3000).open(seed=0)


def test_a_python_without_its_source_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(BadInput, match="data='python_source': must be another source"):
        PythonSource(sequence_length=8).open(seed=0)
