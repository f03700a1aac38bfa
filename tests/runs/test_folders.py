"""A job whose earlier life is still there waits for its end."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from lowvram.results.files.claim import Claim, Held
from lowvram.results.files.run_folder import Kind
from lowvram.runs import folders


def test_a_program_may_wait_for_the_end_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "LOOK_S", 0.05)
    held = Claim(tmp_path / "run", Kind.RUN, "resume")
    with pytest.raises(Held, match=r"resume='.*run': must be a folder in which nobody else runs"):
        folders.begin_run(tmp_path / "run", str(tmp_path / "run"))
    began = time.monotonic()
    with pytest.raises(Held):
        folders.begin_run(tmp_path / "run", str(tmp_path / "run"), wait_s=0.2)
    assert time.monotonic() - began >= 0.2
    threading.Timer(0.5, held.release).start()
    assert folders.begin_run(tmp_path / "run", str(tmp_path / "run"), wait_s=60).folder == tmp_path / "run"
    folders.end_runs(is_refused=False)
