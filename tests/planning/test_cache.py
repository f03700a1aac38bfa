"""What lowvram keeps on this machine to save time, where it can't be kept."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from lowvram.config.cache_folder import CACHE_VARIABLE, cache_folder
from lowvram.planning.cache import write_if_possible


@contextmanager
def no_files_over(num_bytes: int) -> Iterator[None]:
    """As `ulimit -f`: libraries report it as they do a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    """Torch raises a RuntimeError then."""
    with no_files_over(1000):
        write_if_possible(tmp_path / "folder" / "trace", lambda file: torch.save(torch.ones(9999), file))
    assert list((tmp_path / "folder").iterdir()) == []
    (tmp_path / "file").touch()
    write_if_possible(tmp_path / "file" / "trace", lambda file: file.write(b""))


def test_the_caches_folder_may_begin_with_a_tilde(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No shell expands it in a file of settings."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for named, wanted in (("~/x", tmp_path / "x"), ("", tmp_path / ".cache" / "lowvram"), ("/y", Path("/y"))):
        monkeypatch.setenv(CACHE_VARIABLE, named)
        assert cache_folder() == wanted
