"""A folder's marker and its lock, without any run."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lowvram.config.errors import BadInput
from lowvram.results.files.claim import Claim, Held
from lowvram.results.files.durable import made_folders, unfinished_name
from lowvram.results.files.marker import MARKER, Owner, owner_of, read_marker
from lowvram.results.files.run_folder import Kind, is_running


def taken(folder: Path, **about: Any) -> Claim:
    return Claim(folder, about.pop("kind", Kind.RUN), "the.key", **about)


def held_elsewhere(folder: Path) -> subprocess.Popen[bytes]:
    """Another process that has taken a folder, and ends when its stdin is closed."""
    imports = "from pathlib import Path; from lowvram.results.files.claim import Claim, Kind"
    text = f"{imports}; c = Claim(Path({str(folder)!r}), Kind.RUN, 'x')"
    command = [sys.executable, "-c", f"{text}; print('taken', flush=True); input()"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"taken\n"
    return process


def test_a_folder_is_taken_once_and_given_back(tmp_path: Path) -> None:
    first = taken(tmp_path / "a" / "b")
    assert is_running(tmp_path / "a" / "b")
    with pytest.raises(Held, match=rf"process {os.getpid()} on {socket.gethostname()}, since 20.* does; wait"):
        taken(tmp_path / "a" / "b")
    first.release()
    assert not is_running(tmp_path / "a" / "b")
    again = taken(tmp_path / "a" / "b")
    again.undo()  # the folder was there before
    assert (tmp_path / "a" / "b" / MARKER).exists()
    assert json.loads((tmp_path / "a" / "b" / MARKER).read_text())["owner"] is None


def test_what_the_dead_have_left_goes_when_the_folder_is_taken(tmp_path: Path) -> None:
    taken(tmp_path).release()
    for name in ("model", "cache"):
        (tmp_path / name).mkdir()
    probe = "0123456789abcdef"
    (tmp_path / probe).mkdir()
    (tmp_path / "another").mkdir()
    kept = unfinished_name(tmp_path / "another" / "result.json")  # a run in there may be alive
    kept.touch()
    names = ("result.json", "model/files.json", "cache/files.json", f"{probe}/result.json", "model")
    left = [unfinished_name(tmp_path / name) for name in names]
    for path in left[:-1]:
        path.touch()
    left[-1].mkdir()
    (left[-1] / "model.safetensors").touch()
    (tmp_path / ".mine.unfinished").touch()
    claim = taken(tmp_path)
    with pytest.raises(Held):
        taken(tmp_path)
    assert not any(path.exists() for path in left)
    assert (tmp_path / ".mine.unfinished").exists()
    assert kept.exists()
    left[0].touch()  # somebody writes
    with pytest.raises(Held):
        taken(tmp_path)
    assert left[0].exists()
    claim.release()


def test_what_is_undone_was_never_there(tmp_path: Path) -> None:
    taken(tmp_path / "a" / "b").undo()
    assert list(tmp_path.iterdir()) == []


def test_what_others_have_put_there_meanwhile_stays(tmp_path: Path) -> None:
    claim = taken(tmp_path / "a" / "b")
    (tmp_path / "a" / "b" / "note").write_text("mine")
    claim.undo()
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["note"]


def test_the_lock_lasts_as_long_as_anyone_who_keeps_it_open(tmp_path: Path) -> None:
    """A point's processes may write after the program that began it is dead."""
    claim = taken(tmp_path)
    heir = os.dup(claim.fd)
    claim.release()
    assert is_running(tmp_path)
    with pytest.raises(Held, match="another program"):
        taken(tmp_path)
    os.close(heir)
    taken(tmp_path).release()


def test_what_the_dead_have_left_of_a_sweep_goes_when_nobody_else_is_in_it(tmp_path: Path) -> None:
    first = Claim(tmp_path, Kind.SWEEP, "hydra.sweep.dir")
    left = unfinished_name(tmp_path / "table.md")
    left.touch()
    second = Claim(tmp_path, Kind.SWEEP, "hydra.sweep.dir")
    assert left.exists()  # the first may be writing it
    first.release()
    second.release()
    Claim(tmp_path, Kind.SWEEP, "hydra.sweep.dir").release()
    assert not left.exists()


def test_a_lock_goes_with_its_process_however_that_dies(tmp_path: Path) -> None:
    with held_elsewhere(tmp_path) as process:
        with pytest.raises(Held, match=f"process {process.pid} on"):
            taken(tmp_path)
        process.kill()
    taken(tmp_path).release()


def test_sweeps_share_their_folder_and_only_the_last_one_takes_it_away(tmp_path: Path) -> None:
    first, second = taken(tmp_path / "s", kind=Kind.SWEEP), taken(tmp_path / "s", kind=Kind.SWEEP)
    first.undo()
    assert (tmp_path / "s" / MARKER).exists()
    second.release()


def test_who_has_joined_a_sweep_later_stays_named(tmp_path: Path) -> None:
    first = Claim(tmp_path, Kind.SWEEP, "key")
    marker = tmp_path / MARKER
    fields = json.loads(marker.read_text())
    other = {**fields["owner"], "pid": os.getpid() + 1}
    marker.write_text(json.dumps(fields | {"owner": other}).ljust(len(marker.read_text()) - 1) + "\n")
    first.release()
    assert json.loads(marker.read_text())["owner"] == other


@pytest.mark.parametrize("kinds", [(Kind.RUN, Kind.SWEEP), (Kind.SWEEP, Kind.RUN)])
def test_runs_and_sweeps_have_folders_of_their_own(tmp_path: Path, kinds: tuple[Kind, Kind]) -> None:
    taken(tmp_path, kind=kinds[0]).release()
    with pytest.raises(BadInput, match=f"a folder for a {kinds[1].value}: this one holds a {kinds[0].value}"):
        taken(tmp_path, kind=kinds[1])


def test_the_folder_of_one_point_is_not_another_ones(tmp_path: Path) -> None:
    taken(tmp_path, point="a").release()
    taken(tmp_path).release()  # resumed alone: whichever it was
    with pytest.raises(BadInput, match="this one is another point's"):
        taken(tmp_path, point="b")
    taken(tmp_path, point="a").release()


@pytest.mark.parametrize("text", ["mine", "[]", '{"kind": "run"}'])
def test_a_marker_of_somebody_else_is_left_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / MARKER).write_text(text)
    with pytest.raises(BadInput, match=r"whose \.lowvram can be read"):
        taken(tmp_path)
    assert (tmp_path / MARKER).read_text() == text


def test_programs_of_a_sweep_that_write_at_once_leave_a_whole_marker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (taken(tmp_path, kind=Kind.SWEEP) for _ in range(2))
    written = os.pwrite

    def at_once(fd: int, text: bytes, offset: int) -> int:
        monkeypatch.setattr(os, "pwrite", written)
        size = written(fd, text, offset)
        other._write_marker(Owner(1, "host" * 50, "now", 1), None)  # a longer text
        return size

    monkeypatch.setattr(os, "pwrite", at_once)
    one.release()
    assert owner_of(read_marker((tmp_path / MARKER).read_bytes())) == Owner(1, "host" * 50, "now", 1)
    (tmp_path / MARKER).write_text("damaged")
    other.release()
    assert (tmp_path / MARKER).read_text() == "damaged"


def test_what_a_run_has_logged_goes_if_its_first_step_is_refused(tmp_path: Path) -> None:
    names = ("metrics.jsonl", "native.1.log", "tensorboard/events.out.tfevents.1.host", ".hydra/config.yaml")
    for more in ([], ["wandb/run.log", "thesis.tex"]):
        claim = taken(tmp_path / "run")
        for name in [*names, *more]:
            (tmp_path / "run" / name).parent.mkdir(exist_ok=True)
            (tmp_path / "run" / name).touch()
        claim.undo()
        assert (tmp_path / "run").exists() == bool(more)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [MARKER, "thesis.tex", "wandb"]
    taken(tmp_path / "run").release()  # it is a run's still


@pytest.mark.parametrize("kind", Kind)
def test_what_was_there_before_stays_after_a_refusal(tmp_path: Path, kind: Kind) -> None:
    """In a folder without a marker: of somebody else's for a sweep, or of a run whose marker its user has removed."""
    names = ["metrics.jsonl", "native.log", "tensorboard/events.out.tfevents.1.host", ".hydra/overrides.yaml"]
    for name in [*names, "snapshots/step_00000001.0123456789abcdef.pt"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    claim = taken(tmp_path, kind=kind)
    (tmp_path / "multirun.yaml").touch()
    (tmp_path / ".hydra" / "config.yaml").touch()
    claim.undo()
    assert {(tmp_path / name).read_text() for name in names} == {"mine"}
    assert not (tmp_path / "multirun.yaml").exists()
    assert [path.name for path in (tmp_path / ".hydra").iterdir()] == ["overrides.yaml"]


def test_a_run_has_a_name_of_its_own_that_stays(tmp_path: Path) -> None:
    first = taken(tmp_path / "a")
    first.release()
    again, other = taken(tmp_path / "a"), taken(tmp_path / "b")
    assert first.run == again.run != other.run
    assert again.run is not None
    early = tmp_path / "c" / "snapshots" / "step_00000001.0123456789abcdef.pt"
    early.parent.mkdir(parents=True)
    early.touch()
    assert taken(tmp_path / "c").run is None


def test_a_marker_whose_maker_was_killed_at_once_is_ours(tmp_path: Path) -> None:
    (tmp_path / MARKER).touch()
    taken(tmp_path).release()


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("elsewhere"), Path.mkdir, os.mkfifo])
def test_a_marker_that_is_no_file_is_not_followed(tmp_path: Path, make: Any) -> None:
    make(tmp_path / MARKER)
    with pytest.raises((OSError, BadInput)):
        taken(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


# File systems without locks


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)


def leave_marker(folder: Path, owner: Owner | None) -> None:
    (folder / MARKER).write_text(json.dumps({"lowvram": "1", "kind": "run", "owner": owner and vars(owner)}))


def test_without_locks_the_process_that_is_named_counts(tmp_path: Path, without_locks: None) -> None:
    claim = taken(tmp_path)
    assert is_running(tmp_path)
    with pytest.raises(Held, match=f"process {os.getpid()} on"):
        taken(tmp_path)
    claim.release()
    assert not is_running(tmp_path)
    taken(tmp_path).release()


@pytest.mark.parametrize(
    ("owner", "is_held"),
    [
        (Owner(2**22 - 1, socket.gethostname(), "", 1), False),  # no such process
        (Owner(os.getpid(), socket.gethostname(), "", 1), False),  # one that got its number later
        (Owner(1, "another machine", "", 1), True),  # nobody can tell
        (None, False),
    ],
)
def test_without_locks_a_dead_process_holds_nothing(
    tmp_path: Path, without_locks: None, owner: Owner | None, is_held: bool
) -> None:
    leave_marker(tmp_path, owner)
    assert is_running(tmp_path) is is_held
    if is_held:
        with pytest.raises(Held, match="another machine"):
            taken(tmp_path)
    else:
        taken(tmp_path).release()


def test_folders_that_another_program_makes_at_the_same_time_are_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Path.mkdir

    def faster(path: Path, *args: Any, **named: Any) -> None:
        make(path)
        make(path, *args, **named)

    monkeypatch.setattr(Path, "mkdir", faster)
    assert made_folders(tmp_path / "a") == []
    assert (tmp_path / "a").is_dir()
