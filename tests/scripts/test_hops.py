"""The list of files between `main` and the first step, in CONTRIBUTING.md."""

from __future__ import annotations

import subprocess
import sys

import pytest

from scripts.pages.hops import PAGE, PLACE, ROOT, Entry, by_file, page, times_entered

MOST_FILES = 40
ENTRIES = [
    Entry("cli/main.py", "main", "", leads_to_step=True),
    Entry("runs/run.py", "run_point", "main", num_inside=2),
    Entry("runs/run.py", "again", "main", num_inside=1),
    Entry("runs/run.py", "run_point", "other", num_inside=1),
]


def test_a_function_sends_its_reader_to_a_file_once() -> None:
    assert {file: times_entered(found) for file, found in by_file(ENTRIES).items()} == {
        "cli/main.py": 1,
        "runs/run.py": 2,
    }
    assert page(ENTRIES).splitlines()[2:] == [
        "| 1 | [`cli/main.py`](lowvram/cli/main.py) | `main` | 1 |",
        "| 2 | [`runs/run.py`](lowvram/runs/run.py) | `run_point` | 2 |",
    ]


def test_the_list_names_files_that_are_there() -> None:
    (text,) = PLACE.findall(PAGE.read_text())
    files = [line.split("`")[1] for line in text.splitlines()[2:]]
    assert files[0] == "cli/main.py"
    assert files[-1] == "core/step.py"
    assert len(files) <= MOST_FILES
    assert all((ROOT / "lowvram" / file).is_file() for file in files)


@pytest.mark.slow
def test_the_list_is_that_of_the_code() -> None:
    program = "from scripts.pages.hops import followed, page; print(page(followed(()).of_control()), end='')"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    (text,) = PLACE.findall(PAGE.read_text())
    assert done.stdout.endswith(f"\n{text}"), "run scripts/python scripts/pages/hops.py --write"
