"""The folders of runs and sweeps: nothing of the user's is removed or overwritten, and one program writes in each."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from lowvram.cli import job
from lowvram.results.files.run_folder import NAMES, Kind
from tests.calls import TINY, Outcome, Running, history, read_row, wait_until
from tests.tiers import first_of

Call = Callable[..., Outcome]
Start = Callable[..., Running]
Tree = dict[str, tuple[int, int, bytes]]
REFUSED = {
    "train.batch_size=3 accum=x4": "train.batch_size=3: must be at least",
    "precision=fp8": "precision=fp8 needs",
    "mode=plan train.batch_size=3 accum=x4": "train.batch_size=3: must be at least",
    "precision=fp61": "precision=fp61: must be one of",
    "optimizer.lr=nan": "optimizer.lr=nan: must be",
    "data=text data.path=/nope": "data.path='/nope': must be an existing file",
}


def tree(folder: Path) -> Tree:
    """All that lies below a folder: mode, time of the last change and content of each file, and the folders."""
    found: Tree = {}
    for path in sorted(folder.glob("**/*")):
        about = path.lstat()
        changed = about.st_mtime_ns if path.is_file() else 0
        found[str(path.relative_to(folder))] = (about.st_mode, changed, path.read_bytes() if path.is_file() else b"")
    return found


@pytest.fixture
def thesis(tmp_path: Path) -> Path:
    """Somebody's work."""
    folder = tmp_path / "thesis"
    (folder / "chapters").mkdir(parents=True)
    (folder / "chapters" / "one.tex").write_text("It was a dark and stormy night.")
    (folder / ".config").write_text("secret = no")
    (folder / "link").symlink_to("nowhere")
    return folder


@pytest.mark.sampled
@pytest.mark.parametrize("words", REFUSED)
@pytest.mark.parametrize("folder", ["thesis", "."])
def test_a_refused_run_leaves_a_folder_as_it_was(
    call: Call, tmp_path: Path, thesis: Path, words: str, folder: str
) -> None:
    before = tree(tmp_path)
    assert REFUSED[words] in call(*TINY, *words.split(), f"hydra.run.dir={folder}").sentence
    assert tree(tmp_path) == before


@pytest.mark.slow
def test_a_refused_run_removes_the_folders_that_it_made_and_no_others(call: Call, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in ("empty", "new/folder", "empty/new"):
        assert call(*TINY, "precision=fp8", f"hydra.run.dir={folder}").code == 3
    assert list(tree(tmp_path)) == ["empty"]


@pytest.mark.parametrize("words", first_of(["optimizer.lr=nan", "precision=fp61", "seed=0 train.batch_size=-1"]))
@pytest.mark.slow
def test_a_refused_sweep_leaves_a_folder_as_it_was(call: Call, tmp_path: Path, thesis: Path, words: str) -> None:
    before = tree(tmp_path)
    for folder in ("thesis", ".", "new/one"):
        assert call("-m", *TINY, *words.split(), "model.width=32,64", f"hydra.sweep.dir={folder}").sentence
        assert tree(tmp_path) == before


@pytest.mark.parametrize("moment", first_of(["make_point", "begin_run", "check"]))
def test_an_interrupt_before_the_start_leaves_a_folder_as_it_was(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, thesis: Path, moment: str
) -> None:
    before, inner = tree(tmp_path), getattr(job, moment)

    def interrupted(*args: object) -> object:
        os.kill(os.getpid(), signal.SIGINT)
        return inner(*args)

    monkeypatch.setattr(job, moment, interrupted)
    for folder in ("thesis", ".", "new"):
        assert call(*TINY, f"hydra.run.dir={folder}").code == 75
        assert tree(tmp_path) == before


def test_files_in_the_way_are_named_before_anything_runs(call: Call, tmp_path: Path, thesis: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights.bin").write_bytes(b"years of work")
    (tmp_path / ".hydra").mkdir()
    (tmp_path / "table.md").write_text("mine")
    before = tree(tmp_path)
    sentence = call(*TINY, "hydra.run.dir=.").sentence
    assert sentence.startswith(f"hydra.run.dir='{tmp_path}': must be a folder without .hydra, model, table.md, which")
    sentence = call("-m", *TINY, "seed=0,1", "hydra.sweep.dir=.").sentence
    assert sentence.startswith(f"hydra.sweep.dir='{tmp_path}': must be a folder without table.md, which")
    assert tree(tmp_path) == before


def test_a_run_among_other_files_leaves_them_alone(call: Call, tmp_path: Path, thesis: Path) -> None:
    before = tree(tmp_path)
    assert call(*TINY, "hydra.run.dir=.").code == 0
    after = tree(tmp_path)
    assert {name: after[name] for name in before} == before
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_hydra_writes_no_notes_of_its_own(call: Call, tmp_path: Path) -> None:
    expected = "hydra.output_subdir='notes': must be null"
    assert call(*TINY, "hydra.output_subdir=notes").sentence.startswith(expected)
    assert call("-m", *TINY, "seed=0,1", "hydra.output_subdir=notes").sentence.startswith(expected)
    assert tree(tmp_path) == {}


@pytest.mark.slow
def test_all_that_is_written_is_looked_for_before(call: Call, tmp_path: Path) -> None:
    """What a run or a sweep leaves is found by the patterns that keep it from overwriting others' files."""
    run, measured = ("hydra.run.dir=run", "logger=both", "snapshot.every_steps=1"), ("mode=measure", "measure.steps=1")
    assert call(*TINY, *run).code == 0
    assert call(*TINY, *measured, "debug=memory", "hydra.run.dir=looked").code == 0
    assert call(*TINY, *measured, "mode=search", "search.groups=[ckpt]", "hydra.run.dir=searched").code == 0
    assert call("-m", *TINY, *measured, "logger=wandb", "ckpt=none,every1", "hydra.sweep.dir=swept").code == 0
    kinds = {"run": Kind.RUN, "looked": Kind.RUN, "searched": Kind.RUN, "swept": Kind.SWEEP}
    for name, kind in kinds.items():
        folder = tmp_path / name
        points = {path.parent.name for path in folder.glob("*/result.json")}
        left = {path.name for path in folder.iterdir()} - points - {".lowvram"}
        known = {path.name for pattern in NAMES[kind] for path in folder.glob(pattern)}
        assert left <= known, name


# Rows of other points


def test_rows_of_other_points_are_never_taken(call: Call, tmp_path: Path) -> None:
    words = ("-m", *TINY, "hydra.sweep.dir=s", "hydra.sweep.subdir=${hydra.job.num}")
    assert call(*words, "seed=0,1").code == 0
    before = tree(tmp_path)
    sentence = call(*words, "seed=5,6").sentence
    assert sentence.startswith("hydra.sweep.subdir='0': must be a folder for each point: this one is another point's")
    assert tree(tmp_path).keys() == before.keys()
    assert [read_row(tmp_path / "s" / name)["config"]["seed"] for name in "01"] == [0, 1]
    assert (tmp_path / "s" / "multirun.yaml").read_bytes() == before["s/multirun.yaml"][2]
    again = call(*words, "seed=0,1")
    assert again.code == 0


@pytest.mark.slow
def test_a_point_that_was_killed_is_not_continued_as_another(call: Call, tmp_path: Path) -> None:
    """It has left no row, but its marker tells."""
    words = ("-m", *TINY, "hydra.sweep.dir=s", "hydra.sweep.subdir=here")
    assert call(*words, "seed=0").code == 0
    (tmp_path / "s" / "here" / "result.json").unlink()
    assert "this one is another point's" in call(*words, "seed=1").sentence


# One program at a time


@pytest.mark.slow
def test_the_folder_of_a_run_that_runs_is_nobody_elses(start: Start, call: Call, tmp_path: Path) -> None:
    words = (*TINY, "train.steps=100000", "snapshot.every_steps=1", "hydra.run.dir=outputs/run")
    running = start(*words)
    running.wait_for("started")
    wait_until(lambda: any(tmp_path.glob("outputs/run/snapshots/step_*.pt")), "a snapshot")
    held = f"must be a folder in which nobody else runs: process {running.process.pid} on "
    found = call("resume=outputs/run").sentence
    assert found.startswith(f"resume='{tmp_path / 'outputs' / 'run'}': {held}")
    assert "isn't running now" in call("resume=last").sentence
    running.signal_group()
    assert running.end().code == 75
    assert call("resume=last", "train.steps=2").code in (0, 3)  # nobody holds it any more


@pytest.mark.slow
def test_a_sweep_that_is_started_twice_makes_each_point_once(start: Start, tmp_path: Path) -> None:
    words = ("-m", *TINY, "train.steps=30", "seed=0,1,2,3", "hydra.sweep.dir=s")
    both = [start(*words), start(*words)]
    ended = [one.end(120) for one in both]
    assert {one.code for one in ended} <= {0, 75}, "".join(one.said() for one in ended)
    folders = [file.parent for file in (tmp_path / "s").glob("*/result.json")]
    assert len(folders) == 4
    for folder in folders:
        assert read_row(folder)["status"] == "ok"
        assert [line["step"] for line in history(folder) if "loss/train" in line] == list(range(1, 31))
    for one in ended:
        assert (one.code == 75) == ("runs it: type this again to see its row" in one.out)


def test_a_dead_owner_holds_nothing_but_what_its_processes_still_write(
    start: Start, call: Call, tmp_path: Path
) -> None:
    running = start(*TINY, "train.steps=100000", "snapshot.every_steps=1", "hydra.run.dir=outputs/run")
    running.wait_for("started")
    wait_until(lambda: any(tmp_path.glob("outputs/run/snapshots/step_*.pt")), "a snapshot")
    server, child = running.server(), running.child()
    for pid in (server, child):
        os.kill(pid, signal.SIGSTOP)
    os.kill(running.process.pid, signal.SIGKILL)
    running.process.wait()
    assert "must be a folder in which nobody else runs" in call("resume=outputs/run").sentence
    for pid in (server, child):
        os.kill(pid, signal.SIGCONT)
    running.wait_until_gone()
    assert call("resume=outputs/run", "train.steps=1").code in (0, 3)


def test_a_path_back_through_a_link_is_the_folder_behind_it(call: Call, tmp_path: Path) -> None:
    """Hydra would make one folder and name another."""
    (tmp_path / "real" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real" / "inner")
    outcome = call(*TINY, "train.steps=1", "plan.skip=true", "hydra.run.dir=link/../run")
    assert outcome.code == 0, outcome.said()
    assert (tmp_path / "real" / "run" / "result.json").is_file()
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_of_two_equal_sweeps_the_one_that_ends_last_has_all_points(start: Start, tmp_path: Path) -> None:
    """Those that the other one ran while it looked are there when it ends."""
    words = ("-m", *TINY, "train.steps=30", "plan.skip=true", "seed=1,2,3,4", "hydra.sweep.dir=sweep")
    calls = [start(*words, cwd=tmp_path) for _ in range(2)]
    codes = sorted(call.end(200).code for call in calls)
    assert codes[0] == 0
    assert all(read_row(file.parent)["status"] == "ok" for file in tmp_path.glob("sweep/*/result.json"))
