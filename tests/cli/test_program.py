"""What is printed names the program that was typed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lowvram.cli import program
from lowvram.cli.errors import with_presets
from lowvram.config.version import __version__
from tests.calls import ROOT, Outcome

ENVIRONMENT = {**os.environ, "LOWVRAM_PYTHON": sys.executable, "WANDB_MODE": "offline"}


def bash(text: str, cwd: Path = ROOT) -> str:
    done = subprocess.run(["bash", "-c", text], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_the_version_is_lowvrams() -> None:
    assert bash("scripts/train --version") == f"lowvram {__version__}\n"


def test_a_script_is_named_as_it_was_typed(tmp_path: Path) -> None:
    assert "`scripts/train --cfg job` shows them all" in bash("scripts/train precison.x=1")
    (tmp_path / "link").symlink_to(ROOT / "scripts" / "train")
    assert "`./link --cfg job` shows them all" in bash("./link precison.x=1", tmp_path)


@pytest.mark.parametrize("name", ["lowvram", "/elsewhere/lowvram"])
def test_the_installed_command_is_named_as_it_was_typed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In full if another one, or none, is found under its name."""
    on_path = tmp_path / "lowvram"
    on_path.write_text("#!/bin/sh\n")
    on_path.chmod(0o755)
    script = str(on_path) if name == "lowvram" else str(tmp_path / "other" / "lowvram")
    Path(script).parent.mkdir(exist_ok=True)
    Path(script).touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [script, "a=1"])
    monkeypatch.setattr(sys, "orig_argv", ["/venv/bin/python", script, "a=1"])
    monkeypatch.setattr(program, "_words", [])
    program.note_program()
    typed = "lowvram" if name == "lowvram" else script
    assert sys.orig_argv == [typed, "a=1"]
    assert program.program() == typed


def test_python_is_named_as_it_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "a=1"])
    monkeypatch.setattr(sys, "orig_argv", ["python3", "train.py", "a=1"])
    monkeypatch.setattr(program, "_words", [])
    program.note_program()
    assert program.program() == "python3 train.py"


def test_the_help_names_the_program() -> None:
    said = bash("scripts/train --help")
    assert "\n  scripts/train precision=bf16 ckpt=every2\n" in said
    assert "python train.py" not in said


def test_scripts_train_is_completed_by_bash() -> None:
    said = bash(
        'eval "$(scripts/train -sc install=bash)"; complete -p scripts/train\n'
        'for typed in "preci" "precision=bf" "experiment=le"; do COMP_LINE="scripts/train $typed"\n'
        'COMP_POINT=${#COMP_LINE} COMP_CWORD=1; hydra_bash_completion; echo "${COMPREPLY[@]}"; done'
    )
    rule, *completions = said.splitlines()
    assert rule.endswith("-F hydra_bash_completion scripts/train")
    assert completions == [
        "precision. precision=",
        "precision=bf16 precision=bf16_pure precision=bf16_split",
        "experiment=lean",
    ]


def test_a_preset_may_be_typed_with_a_plus(call: Callable[..., Outcome]) -> None:
    assert with_presets(["+experiment=a", "++sweep=b", "+model.args.x=1", "a=1"]) == [
        *("experiment=a", "sweep=b", "+model.args.x=1", "a=1"),
    ]
    outcomes = [call(f"{plus}experiment=lean", "--cfg", "job") for plus in ("", "+")]
    assert outcomes[0].code == 0
    assert outcomes[0].out == outcomes[1].out
