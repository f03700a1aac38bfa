"""Modules of users that would end the program, or leave it without output, when they are imported."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lowvram.config.code_names import IMPORTED
from lowvram.config.errors import BadInput
from lowvram.config.importing import import_object
from tests.calls import ROOT, TINY, Outcome

ENDING = {
    "import sys; sys.exit(5)": "its module calls sys.exit(5)",
    "raise SystemExit('bye')": "its module calls sys.exit('bye')",
    "exit()": "its module calls sys.exit(None)",
    "raise KeyboardInterrupt": "its module raises KeyboardInterrupt",
    "raise GeneratorExit": "its module raises GeneratorExit",
    "def __getattr__(name):\n    raise SystemExit(3)": "its module calls sys.exit(3)",
}


def test_a_module_that_would_end_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    before = signal.signal(signal.SIGINT, lambda *_: None)  # as in the program
    for number, (text, expected) in enumerate(ENDING.items()):
        (tmp_path / f"ending{number}.py").write_text(text)
        for key in IMPORTED:
            with pytest.raises(BadInput, match=r"must be importable") as refused:
                import_object(f"ending{number}.Thing", key)
            assert expected in str(refused.value)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):  # in a program of the user's own it may be a Ctrl-C
        import_object("ending3.Thing", "model.target")
    signal.signal(signal.SIGINT, before)


PROGRAM = """
import sys
from lowvram.config.importing import import_object
try:
    import_object("closing.A", "callbacks")
except ValueError as error:
    print("still here", flush=True)
    print(error, file=sys.stderr, flush=True)
"""


@pytest.mark.parametrize(
    "text",
    [
        "import sys; sys.stdout.close(); sys.stderr.close()",
        "import os; os.close(1); os.close(2)",
        "import os; os.closerange(1, 3); raise ValueError",
    ],
)
def test_a_module_that_closes_the_output(tmp_path: Path, text: str) -> None:
    (tmp_path / "closing.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{ROOT}:{tmp_path}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "still here\n"


def test_the_program_says_so(call: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "leaving.py").write_text("import sys; sys.exit(5)")
    sentence = call(*TINY, "callbacks=[leaving.A]").sentence
    assert sentence.endswith("must be importable: its module calls sys.exit(5) when it is imported")
