"""What answers at once: help, completion, the configuration. None of it starts a point or imports torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from lowvram.config.registry import options_of
from tests.calls import ROOT, Outcome

Call = Callable[..., Outcome]


def test_the_command_line_imports_no_torch() -> None:
    """Nor what else takes its time; wandb and rich wait for the first point."""
    heavy = {"torch", "wandb", "datasets", "rich", "numpy", "PIL", "safetensors"}
    code = f"import sys, lowvram.cli.main; print({heavy!r} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    ("words", "answer"),
    {
        "--help": f"ckpt: {', '.join(options_of('ckpt'))}",
        "--cfg job precision=bf16 --package train": "batch_size: 32",
        "precision=bf16 --cfg job": "_target_: lowvram.knobs.precision.Bf16",
        "--hydra-help": "--multirun",
        "--version": "Hydra",
    }.items(),
)
def test_questions_are_answered(call: Call, words: str, answer: str) -> None:
    outcome = call(*words.split())
    assert outcome.code == 0, outcome.said()
    assert answer in outcome.out
    assert outcome.err == ""
    assert list(outcome.cwd.iterdir()) == []


@pytest.mark.parametrize(
    ("typed", "offered"),
    {
        "stepping=": [f"stepping={option}" for option in options_of("stepping")],
        "precision=bf16 ckpt=every1 ckpt.ev": ["ckpt.every="],
        "train.s": ["train.steps="],
        "-m model=gpt2_m": ["model=gpt2_medium"],
    }.items(),
)
def test_words_are_completed(call: Call, monkeypatch: pytest.MonkeyPatch, typed: str, offered: list[str]) -> None:
    monkeypatch.setenv("COMP_LINE", f"python train.py {typed}")
    outcome = call("--shell-completion", "query=bash")
    assert outcome.code == 0, outcome.said()
    assert outcome.out.split() == offered
    assert list(outcome.cwd.iterdir()) == []


def test_help_of_the_program(train: Call) -> None:
    outcome = train("--help")
    assert outcome.code == 0, outcome.said()
    assert "model: external, gpt2" in outcome.out
    assert outcome.err == ""
