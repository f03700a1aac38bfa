"""What examples/ ships fits the configuration that it speaks of."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.calls import TINY, Outcome
from tests.offline import records_of, summary_of
from tests.wandb_server import ENTITY, KEY, PROJECT, SWEEP, wandb_server

pytestmark = pytest.mark.medium

ROOT = Path(__file__).parents[1]


def one_of(parameter: Any) -> Any:
    """A value that the agent could pick."""
    found = next(parameter[key] for key in ("value", "min", "values") if key in parameter)
    return found[-1] if isinstance(found, list) else found


def test_a_run_that_an_agent_of_wandb_would_start(call: Callable[..., Outcome]) -> None:
    sweep = OmegaConf.load(ROOT / "examples" / "wandb_sweep.yaml")
    picked = {key: one_of(OmegaConf.to_container(parameter)) for key, parameter in sweep.parameters.items()}
    outcome = call(*(f"{key}={value}" for key, value in picked.items()), *TINY)
    assert outcome.code == 0, outcome.said()
    assert outcome.row["choices"]["precision"] == picked["precision"]
    assert outcome.row["loss"]["eval"] is not None  # what the sweep minimises
    assert (ROOT / sweep.program).exists()


@pytest.mark.slow
def test_an_agent_of_wandb_runs_the_points_that_a_sweep_picks(tmp_path: Path) -> None:
    """`wandb sweep` and `wandb agent`, as docs/loggers.md has them, with a stand-in for W&B's server."""
    tiny = {key: value for key, _, value in (word.partition("=") for word in TINY) if key != "logger"}
    picks = [{"optimizer.lr": 0.01, "precision": "bf16"}, {"optimizer.lr": 0.001, "precision": "fp32"}]
    with wandb_server([{**tiny, **pick, "train.steps": 2} for pick in picks]) as server:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # agents start the first `python`
        settings = {"WANDB_BASE_URL": server.address, "WANDB_API_KEY": KEY, "HOME": str(tmp_path), "PATH": path}
        wandb(tmp_path, "sweep", str(ROOT / "examples" / "wandb_sweep.yaml"), **settings)
        assert server.config["metric"] == {"name": "loss/eval", "goal": "minimize"}
        server.config["program"] = str(ROOT / "train.py")  # the agent starts in another folder
        wandb(tmp_path, "agent", f"{ENTITY}/{PROJECT}/{SWEEP}", **settings, WANDB_MODE="offline")
    assert (server.num_begun, server.unknown) == (2, [])
    runs = {folder.parent.name: folder.parent for folder in tmp_path.glob("outputs/*/*/result.json")}
    assert len(runs) == 2
    for number, folder in enumerate(runs[name] for name in sorted(runs)):
        (part,) = folder.glob("wandb/offline-run-*")
        about = next(record["run"] for record in records_of(part) if record["type"] == "run")
        assert (about["sweep_id"], about["run_id"]) == (SWEEP, f"picked{number + 1}")
        config, summary = summary_of(part)["config"], summary_of(part)["summary"]
        assert config["optimizer"]["lr"] == picks[number]["optimizer.lr"]
        assert config["choice"]["precision"] == picks[number]["precision"]
        assert summary["loss/eval"] > 0


def wandb(folder: Path, *words: str, **environment: str) -> None:
    command = [sys.executable, "-m", "wandb", *words]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    done = subprocess.run(command, cwd=folder, env=clean | environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("name", "printed"), [("own_loop", "step 2: loss"), ("own_model", "on an RTX 3060")])
def test_an_example_runs(name: str, printed: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom_and_shows_what_it_prints() -> None:
    cells = json.loads((ROOT / "examples" / "own_model.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec("".join(cell["source"]), names)
            shown = "".join("".join(output.get("text", "")) for output in cell["outputs"])
            assert re.sub(r"[\d.]+", "N", printed.getvalue()) == re.sub(r"[\d.]+", "N", shown)
    assert repr(names["rig"]) == "".join(cells[-2]["outputs"][-1]["data"]["text/plain"])


@pytest.mark.slow
def test_the_examples_model_trains_from_the_command_line(call: Callable[..., Outcome]) -> None:
    words = ["model=external", "model.target=examples.own_model.Speaker", "model.args={vocab_size: data.vocab_size}"]
    words += ["model.reads=TOKENS"]
    outcome = call(*words, "ckpt=every1", "train.steps=2", "train.batch_size=2", "data.eval_samples=2", "logger=none")
    assert outcome.code == 0, outcome.said()
    assert outcome.row["model"]["blocks"] == "6 TransformerEncoderLayer"
