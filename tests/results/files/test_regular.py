"""Pipes, devices, links and files without end in the folders of others: refused at once."""

from __future__ import annotations

import os
import random
import resource
import shutil
from pathlib import Path

import pytest

from lowvram.config.errors import BadInput
from lowvram.loops.export.folder import load
from lowvram.models.hf_weights import check_index
from lowvram.models.layout import names_at
from lowvram.results import row as rows
from lowvram.results import table
from lowvram.results.files import manifest
from lowvram.results.files.claim import Claim
from lowvram.results.files.marker import point_of
from lowvram.results.files.other_format import check_safetensors
from lowvram.results.files.regular import Irregular, read_regular
from lowvram.results.files.run_folder import NAMES, Kind, was_cut_off
from lowvram.results.loggers.wandb import stored_run_id
from lowvram.results.memory_over_step import read as read_moments
from lowvram.results.metric_lines import read_lines
from lowvram.runs.hydra_notes import read_notes, words_of


def made(path: Path, kind: str) -> None:
    """Something that can't be read to its end."""
    path.unlink(missing_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "zeros":
            path.symlink_to("/dev/zero")
        case "sparse":
            with path.open("wb") as file:
                file.truncate(2**42)


@pytest.mark.parametrize("kind", ["pipe", "zeros", "sparse"])
def test_files_that_never_end(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("result.json", "metrics.jsonl", "wandb_run_id", "files.json", ".lowvram"):
        made(tmp_path / name, kind)
    (tmp_path / ".hydra").mkdir()
    for name in ("overrides.yaml", "config.yaml"):
        made(tmp_path / ".hydra" / name, kind)
    assert rows.read(tmp_path) is None
    assert "is ignored, as it was damaged, or isn't a row that lowvram wrote: it is " in capsys.readouterr().err
    with pytest.raises(Irregular, match="it is "):
        read_lines(tmp_path / "metrics.jsonl")
    assert stored_run_id(tmp_path) is None
    with pytest.raises(ValueError, match="it is "):
        manifest.read(tmp_path)
    assert not was_cut_off(tmp_path)
    assert read_notes(tmp_path) == {}
    with pytest.raises(BadInput, match=r"can be read: it is "):
        words_of(tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "zeros"])
def test_tables_and_models_with_them(tmp_path: Path, kind: str) -> None:
    (tmp_path / "point").mkdir()
    for name in ("result.json", "memory_over_step.csv"):
        made(tmp_path / "point" / name, kind)
    assert table.collect(tmp_path) == []
    assert read_moments(tmp_path / "point") is None
    for name in ("config.json", "model.safetensors", "tokenizer.json", "export.json", "lowvram.json"):
        shutil.rmtree(tmp_path / "model", ignore_errors=True)
        (tmp_path / "model").mkdir()
        made(tmp_path / "model" / name, kind)
        with pytest.raises(BadInput, match=f"a folder whose {name} can be read: it is a"):
            load(tmp_path / "model")


def test_what_is_read_may_be_a_link_to_a_file(tmp_path: Path) -> None:
    """As in the cache of Hugging Face."""
    (tmp_path / "blob").write_bytes(b"whole")
    (tmp_path / "link").symlink_to("blob")
    assert read_regular(tmp_path / "link", 5) == b"whole"
    with pytest.raises(Irregular, match="too large: 5 bytes, at most 4 are read"):
        read_regular(tmp_path / "link", 4)


def test_nothing_is_written_through_links(tmp_path: Path) -> None:
    """A run's folder with a link, or a pipe, for any name of ours isn't taken, and what it leads to stays."""
    chosen, theirs = random.Random(20261127), tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "thesis.txt").write_text("all")
    for number, (kind, pattern) in enumerate([(of, name) for of in Kind for name in NAMES[of]]):
        folder = tmp_path / str(number)
        Claim(folder, kind, "the.key").release()
        name = pattern.replace("*", "1")
        target = chosen.choice([theirs / "thesis.txt", theirs, tmp_path / "nothing"])
        chosen.choice([lambda path, to=target: path.symlink_to(to), os.mkfifo])(folder / name)
        with pytest.raises(BadInput, match=r"lowvram would write through it"):
            Claim(folder, kind, "the.key")
    assert (theirs / "thesis.txt").read_text() == "all"
    assert [*theirs.iterdir()] == [theirs / "thesis.txt"]
    assert not (tmp_path / "nothing").exists()


def test_reading_takes_no_more_memory_than_the_file(tmp_path: Path) -> None:
    path, most_bytes = tmp_path / "small.json", 2**34
    path.write_text("{}")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + 2**26, limits[1]))
    try:
        assert read_regular(path, most_bytes) == b"{}"
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000])
def test_brackets_without_end_are_damage(tmp_path: Path, text: str) -> None:
    for name in (".lowvram", "export.json", "reference.json", "model.safetensors.index.json"):
        (tmp_path / name).write_text(text)
    assert point_of(tmp_path) is None
    with pytest.raises(BadInput, match="holds an export of another format"):
        check_safetensors(tmp_path, "model.init", "x")
    with pytest.raises(BadInput, match=r"model\.safetensors\.index\.json can be read"):
        check_index("x", tmp_path)


@pytest.mark.parametrize("header", [b"\xff" * 8, b"\x02" + bytes(7) + b"[]", b""])
def test_weights_whose_header_lies_are_refused_by_whoever_starts_from_them(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(header)
    with pytest.raises(BadInput, match=r"an exported model whose model\.safetensors can be read"):
        names_at("x", [tmp_path / "model.safetensors"])
