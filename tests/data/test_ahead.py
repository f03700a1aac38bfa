"""Workers that can't hand their batches over: an error that says why, and no waiting for ever."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from lowvram.config.errors import Shortage
from lowvram.core.rig import Part
from lowvram.data import ahead

# torch's advice on a machine of one core; two workers are right there too.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
# Runs as root of a namespace of its own, in which it may mount what it likes.
SCRIPT = """
    import os, subprocess, sys, tempfile
    from multiprocessing import process
    import torch
    from lowvram.config.errors import Shortage
    from lowvram.core.rig import Part
    from lowvram.data import ahead, image_cache

    def mounted(folder, options):
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)

    def first(num_bytes):
        make = lambda key: Part(torch.zeros(num_bytes, dtype=torch.uint8), torch.tensor(key))
        batches = ahead.make_batches_ahead(iter(range(99)), make, 2, 2, torch.device("cpu"))
        try:
            return [int(next(batches).targets) for _ in range(9)]
        except Shortage as error:
            return str(error).replace(chr(10), " | ")
        finally:
            batches.close()

    mounted("/dev/shm", "size=1m")
    print("small:", first(100))
    print("large:", first(300_000))
    ahead.check_shared = lambda part, num_batches: None
    print("late:", first(2_000_000))
    folder = sys.argv[1]
    mounted(folder, "nr_inodes=2")
    tempfile.tempdir = folder
    process.current_process()._config.pop("tempdir")  # a folder that multiprocessing has made elsewhere
    print("one inode:", first(100))
    tempfile.tempdir = None
    process.current_process()._config.pop("tempdir")
    def fill(but_pages):
        with open("/dev/shm/full", "wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)): pass
            except OSError: pass
            file.truncate(file.tell() - 4096 * but_pages)

    for free in range(1, 9):  # some of the workers are started, or of the locks made
        fill(free)
        print(f"{free} pages:", first(100))
    fill(0)
    for name, used in (("start", lambda: first(100)), ("cache", image_cache.Tally)):
        try:
            print(f"{name}:", used())
        except Shortage as error:
            print(f"{name}:", error)
"""


@pytest.mark.slow
def test_full_shared_memory_and_temporary_folders_are_named(tmp_path: Path) -> None:
    """No case waits."""
    if subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True).returncode:
        pytest.skip("mounting isn't allowed here")
    words = ["unshare", "-m", sys.executable, "-W", "ignore", "-c", textwrap.dedent(SCRIPT), str(tmp_path)]
    run = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=ROOT)
    told = dict(line.split(": ", 1) for line in run.stdout.splitlines())
    some = {f"{free} pages" for free in range(1, 9)}
    assert told.keys() == {"small", "large", "late", "one inode", "start", "cache", *some}, run.stderr
    assert "Exception ignored" not in run.stderr
    for name in some:
        assert "/dev/shm" in told[name] or told[name] == told["small"], (name, told[name])
    assert told["small"] == str(list(range(9)))
    assert re.search(r"/dev/shm has [\d.]+ \w+ left, and the loader's workers need .* batches of", told["large"])
    assert "--shm-size" in told["large"]
    assert "a batch can't be put into shared memory" in told["late"]
    assert "the folder for temporary files is full" in told["one inode"]
    assert "TMPDIR" in told["one inode"]
    assert "the loader's workers can't be started" in told["start"]
    assert "/dev/shm" in told["start"]
    assert "loader.cache can't be used" in told["cache"]


class Unsendable(torch.Tensor):
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise OSError("no socket")


def test_a_batch_that_was_made_and_does_not_come_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ahead, "LOST_AFTER_S", 0.5)

    def make(key: int) -> Part:
        return Part(torch.zeros(2), torch.tensor(key) if key < 3 else torch.zeros(2).as_subclass(Unsendable))

    batches = ahead.make_batches_ahead(iter(range(99)), make, 1, 1, CPU)
    assert [int(next(batches).targets) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(Shortage, match=r"^batch 3 of the loader's workers was made, but never came: /dev/shm or"):
        next(batches)
    assert capfd.readouterr().err == "a loader's worker can't send a batch: no socket\n"


def test_slow_batches_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setattr(ahead, "LOST_AFTER_S", 0.2)

    def make(key: int) -> Part:
        time.sleep(0.7)
        return Part(torch.zeros(2), torch.tensor(key))

    batches = ahead.make_batches_ahead(iter(range(99)), make, 2, 1, CPU)
    assert [int(next(batches).targets) for _ in range(3)] == [0, 1, 2]
    batches.close()
