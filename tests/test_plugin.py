"""A plug-in that nobody has heard of, tests/plugin: an optimizer, and a group of its own. It needs no line of ours, it
trains from the command line, and the laws hold over it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from lowvram import api
from lowvram.config.defaults import ROOT
from lowvram.config.registry import knob_of
from lowvram.config.settings import GROUPS
from tests.calls import TINY, Outcome
from tests.laboratory import KNOBS, NEUTRAL
from tests.plugged import PACKAGE, install, known_nowhere_afterwards
from tests.test_laws import error_of, keeps_the_names, keeps_the_numbers, saved_share

OPTIONS = (("optimizer", "lion"), ("garbage", "steps"))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which it is installed."""
    site = tmp_path_factory.mktemp("site")
    install(site)
    return {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}


def row_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


def test_it_trains_from_the_command_line(train: Callable[..., Outcome], path: dict[str, str], tmp_path: Path) -> None:
    words = (*TINY, "train.steps=3", "optimizer=lion", "garbage=steps", "garbage.every=2")
    done = train(*words, f"hydra.run.dir={tmp_path}/run", env=path)
    assert done.code == 0, done.err
    row = row_of(tmp_path / "run")
    assert row["status"] == "ok"
    assert {"optimizer": "lion", "garbage": "steps"}.items() <= row["choices"].items()
    assert row["config"]["garbage"] == {"_target_": f"{PACKAGE}.garbage.EverySteps", "every": 2}
    assert row["loss"]["eval"] > 0


@pytest.mark.slow  # quicker ones: tests/config/test_plugins.py
def test_points_without_it_are_those_of_a_program_without_it(
    train: Callable[..., Outcome], path: dict[str, str], tmp_path: Path
) -> None:
    words = (*TINY, "mode=plan")
    plain = train(*words, f"hydra.run.dir={tmp_path}/plain")
    beside = train(*words, f"hydra.run.dir={tmp_path}/beside", env=path)
    assert (plain.code, beside.code) == (0, 0)
    without, with_it = row_of(tmp_path / "plain"), row_of(tmp_path / "beside")
    assert without["id"] == with_it["id"]
    assert list(with_it["choices"]) == [*GROUPS, "garbage", "logger"]
    assert list(without["choices"]) == [*GROUPS, "logger"]


@pytest.mark.slow  # tests/config/test_plugins.py asks without processes
@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("garbage=often", "garbage=often: must be one of none, steps"),
        ("garbage=steps garbage.every=0", "garbage.every=0: must be at least 1 update"),
        ("garbage._target_=os.system", "must be a class inside lowvram or an installed plug-in"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    train: Callable[..., Outcome], path: dict[str, str], word: str, sentence: str
) -> None:
    refused = train(*TINY, *word.split(), env=path)
    assert refused.code
    (line,) = (line for line in f"{refused.out}{refused.err}".splitlines() if "must be" in line)
    assert sentence in line


def run_python(path: dict[str, str], *words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env={**os.environ, **path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("pair", OPTIONS)
def test_the_first_laws_hold(pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    group, problem = pair[0], "transformer"
    with known_nowhere_afterwards():
        monkeypatch.setitem(NEUTRAL, "garbage", "none")
        for each in (*OPTIONS, ("garbage", "none")):
            monkeypatch.setitem(KNOBS, each, knob_of(each))
        knob = KNOBS[pair]
        assert keeps_the_numbers(knob, error_of(group, knob, problem, torch.float32), problem, torch.float32)
        assert keeps_the_names(group, knob, problem)
        assert knob.saves is None or saved_share(group, knob, problem) > 0
        knobs = api.all_knobs([knob])
        assert f"{group}={type(knob).__name__}" in knobs
        assert group != "optimizer" or len(knobs) == len(api.all_knobs(""))


@pytest.mark.slow
def test_all_laws_hold(path: dict[str, str]) -> None:
    laws = ["tests/test_laws.py", "tests/test_laws_of_pairs.py", "tests/knobs/test_optimizer.py"]
    told = run_python(path, "-m", "pytest", "-q", "-n0", *laws, "-k", "lion or garbage")
    assert int(told.rpartition(" passed")[0].split()[-1]) > 30


def test_the_page_shows_it() -> None:
    page = (ROOT / "docs" / "plugins.md").read_text()
    folder = ROOT / "tests" / "plugin" / PACKAGE
    for name in ("garbage.py", "conf/garbage/none.yaml", "conf/garbage/steps.yaml"):
        assert (folder / name).read_text().rstrip("\n") in page, name
    assert OmegaConf.load(folder / "conf" / "garbage" / "none.yaml")
