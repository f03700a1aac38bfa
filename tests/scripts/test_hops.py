"""How many files lie between `main` and the first step."""

from __future__ import annotations

import subprocess
import sys

import pytest

from scripts.pages.hops import ROOT, Entry, by_file, times_entered

MOST_FILES = 46  # 41 before leases for network storage
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


@pytest.mark.slow
def test_the_first_step_is_few_files_away() -> None:
    program = (
        "from scripts.pages.hops import followed, by_file; print('\\n' + ' '.join(by_file(followed(()).of_control())))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    files = done.stdout.splitlines()[-1].split()
    assert (files[0], files[-1]) == ("cli/main.py", "core/step.py")
    assert len(files) <= MOST_FILES, files
