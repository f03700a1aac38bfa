"""The program's output takes any text, and nothing that becomes of it ends a run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.calls import ROOT, TINY_RESNET, Outcome

Call = Callable[..., Outcome]
NAMED = [word for word in TINY_RESNET if word != "data=synthetic" and not word.startswith("data.num")]
BAD_NAME = b"0\xff\xe4.png"  # no UTF-8: Python reads it with surrogates


def shown(stream: str, encoding: str, program: str) -> subprocess.CompletedProcess[bytes]:
    imports = "import sys; from lowvram.launch.streams import protect_streams"
    code = f"{imports}; protect_streams(); print({program}, file=sys.{stream})"
    env = {**os.environ, "PYTHONIOENCODING": encoding}
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize(
    ("encoding", "expected"),
    [
        ("ascii", rb"\xe4 \u20ac \udcff"),
        ("latin-1", b"\xe4 " + rb"\u20ac \udcff"),
        ("utf-8", "ä € ".encode() + rb"\udcff"),
    ],
)
def test_any_text_can_be_printed(stream: str, encoding: str, expected: bytes) -> None:
    done = shown(stream, encoding, "'\\xe4 \\u20ac \\udcff'")
    assert (done.returncode, getattr(done, stream)) == (0, expected + b"\n")


@pytest.fixture
def strange_images(tmp_path: Path) -> Path:
    """Images that are none, under names that no text has."""
    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(8):
            (tmp_path / "images" / name / (str(number) + os.fsdecode(BAD_NAME))).write_bytes(b"no image")
    return tmp_path / "images"


@pytest.mark.slow
def test_a_file_name_that_is_no_text_ends_no_sweep(train: Call, strange_images: Path) -> None:
    """On a terminal that knows ASCII alone: it is in reasons, the table, the report."""
    words = ("-m", *NAMED, "data=imagefolder", f"data.path={strange_images}", "seed=1,2", "logger=none")
    outcome = train(*words, env={"PYTHONIOENCODING": "ascii"})
    assert outcome.code == 3, outcome.said()
    assert list(outcome.statuses.values()) == ["incompatible"] * 2
    assert "\\udcff\\udce4.png" in outcome.out
    assert "Traceback" not in outcome.err
    assert "\\udcff" in next(outcome.cwd.glob("outputs/sweeps/*/*/table.md")).read_text()
    assert list(outcome.cwd.glob("outputs/sweeps/*/*/report.html"))


@pytest.mark.slow
def test_a_child_prints_any_text(train: Call) -> None:
    outcome = train(*TINY_RESNET, "name=strange_line", env={"PYTHONIOENCODING": "ascii"})
    assert outcome.code == 0, outcome.said()
    assert "strange \\udcff \\u20ac\n" in outcome.out


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_behind_stdout_costs_what_is_printed(tmp_path: Path) -> None:
    """`python train.py > log` on a disk that is full: results are kept elsewhere, and the exit code is the run's."""
    words = [*TINY_RESNET, "train.steps=1"]
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, str(ROOT / "train.py"), *words]
        done = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True)
    outcome = Outcome(done.returncode, "", done.stderr, tmp_path)
    assert outcome.code == 0, outcome.said()
    assert outcome.err == "stdout can't be written (No space left on device): the run goes on without it\n"
    assert outcome.row["status"] == "ok"
