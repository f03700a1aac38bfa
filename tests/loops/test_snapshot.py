"""Snapshots: whole or not there, named by their hash, and only the newest stay."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lowvram.config.errors import BadInput, Incompatible
from lowvram.core import generators
from lowvram.loops import snapshot as snapshot_module
from lowvram.loops.snapshot import Snapshots, check_form, fingerprint, has_form
from lowvram.results.files.durable import unfinished_name
from lowvram.results.files.run_folder import has_snapshots, snapshots_in


def state_of(step: int) -> dict[str, Any]:
    return {"step": step, "loss": 0.5, "weights": {"a.b": torch.full((3,), float(step))}, "random": generators.saved()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_snapshot_goes_round(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path / "snapshots", keep=2)
    assert snapshots.load() is None
    path = snapshots.save(7, state_of(7))
    assert path.name == f"step_00000007.{fingerprint(path)}.pt"
    found = snapshots.load()
    assert found is not None
    assert (found["step"], found["loss"], found["weights"]["a.b"].tolist()) == (7, 0.5, [7.0] * 3)


def test_only_the_newest_stay(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path, keep=2)
    for step in (1, 2, 9, 10):
        snapshots.save(step, state_of(step))
    assert [name.partition(".")[0] for name in names(tmp_path)] == ["step_00000009", "step_00000010"]


def test_what_was_to_go_when_a_program_was_killed_goes_with_the_next(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        Snapshots(tmp_path, keep=4).save(step, state_of(step))
    Snapshots(tmp_path, keep=2).forget_older()
    assert [name.partition(".")[0] for name in names(tmp_path)] == ["step_00000003", "step_00000004"]


DAMAGE = {
    "cut": lambda data: data[:-1],
    "empty": lambda data: b"",
    "flipped": lambda data: data[:99] + b"!" + data[100:],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("keep", [1, 2, 3])
def test_a_damaged_one_is_reported_of_and_the_one_before_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Any, keep: int
) -> None:
    snapshots = Snapshots(tmp_path, keep=3)
    paths = [snapshots.save(step, state_of(step)) for step in (1, 2, 9)]
    paths[-1].write_bytes(damage(paths[-1].read_bytes()))
    snapshots = Snapshots(tmp_path, keep)
    found = snapshots.load()
    assert found is not None
    assert found["step"] == 2
    said = capsys.readouterr().out
    assert f"{paths[-1]} is damaged" in said
    assert f"continuing from {paths[1]}" in said
    # What is damaged is no snapshot any more, so a run that goes on keeps its own.
    later = snapshots.save(3, state_of(3))
    assert later in snapshots_in(tmp_path)
    assert [path.name[5:13] for path in snapshots_in(tmp_path)] == ["00000003", "00000002", "00000001"][:keep]
    assert paths[-1].with_suffix(".damaged").exists()


def test_nothing_but_damaged_ones_is_refused(tmp_path: Path) -> None:
    """And all stay as they are: whoever wants to start again says so."""
    snapshots = Snapshots(tmp_path / "snapshots", keep=2)
    for step in (1, 2):
        snapshots.save(step, state_of(step)).write_bytes(b"junk")
    before = names(snapshots.folder)
    with pytest.raises(BadInput, match=f"resume='{tmp_path}': must be .* all 2 of this one are damaged"):
        snapshots.load()
    assert names(snapshots.folder) == before


def test_another_runs_is_put_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine, other = Snapshots(tmp_path, keep=9, run="a"), Snapshots(tmp_path, keep=9, run="b")
    mine.save(1, state_of(1))
    path = other.save(2, state_of(2))
    found = mine.load()
    assert found is not None
    assert found["step"] == 1
    assert f"{path} is another run's, now {path.stem}.damaged: going back to the one before" in capsys.readouterr().out
    assert path.with_suffix(".damaged").exists()


@pytest.mark.parametrize("names", [("a", None), (None, "b")])
def test_a_run_that_nobody_has_named_takes_any(tmp_path: Path, names: tuple[str | None, str | None]) -> None:
    saved, loaded = (Snapshots(tmp_path, keep=2, run=name) for name in names)
    saved.save(1, state_of(1))
    assert loaded.load() is not None


def test_nothing_but_another_runs_is_refused(tmp_path: Path) -> None:
    mine, other = (Snapshots(tmp_path / "snapshots", keep=2, run=name) for name in "ab")
    other.save(1, state_of(1))
    other.save(2, state_of(2)).write_bytes(b"junk")
    before = names(mine.folder)
    with pytest.raises(BadInput, match=r"snapshot of its own: 1 of 2 here are another run's, as \.lowvram .* remove"):
        mine.load()
    assert names(mine.folder) == before


def test_a_state_that_is_refused_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshots = Snapshots(tmp_path, keep=2)
    for step in (1, 2):
        path = snapshots.save(step, state_of(step))
    path.write_bytes(b"junk")
    before = names(tmp_path)

    def refuse(state: dict[str, Any]) -> None:
        raise Incompatible(f"not {state['step']}")

    with pytest.raises(Incompatible, match="not 1"):
        snapshots.load(refuse)
    assert names(tmp_path) == before
    assert capsys.readouterr().out == ""


FORMS = {
    "the same": ({"a": torch.ones(2), "b": [1, "x"]}, {"a": torch.zeros(2), "b": [2, "x"]}, True),
    "not born yet": ({"state": {0: torch.ones(2)}, "norm": torch.ones(())}, {"state": {}, "norm": None}, True),
    "another shape": ({"a": torch.ones(2)}, {"a": torch.ones(3)}, False),
    "one more": ({"a": 1}, {"a": 1, "b": 1}, False),
    "one less": ({"a": [1, 2]}, {"a": [1]}, False),
    "another kind": ({"a": 1.0}, {"a": torch.ones(2)}, False),
    "another name": ({"a": "x"}, {"a": "y"}, False),
}


@pytest.mark.parametrize("form", FORMS)
def test_form(form: str) -> None:
    saved, fresh, expected = FORMS[form]
    assert has_form(saved, fresh) is expected


def test_only_what_was_changed_is_to_blame() -> None:
    """Without a change the state is tried: another version of torch may know more names."""
    states = {"model": {"a": torch.ones(2)}, "stepper": {"b": 1}}
    saved = {"chosen": {"model": "big", "model.width": 2, "optimizer": "adamw"}, **states}
    check_form(saved | {"stepper": {}}, saved)
    check_form(saved | {"stepper": {"b": 1, "c": 1}}, saved)
    check_form(saved | {"chosen": {**saved["chosen"], "accum": "x2"}, "stepper": {"c": 1}}, saved)
    wider = {"chosen": {"model": "big", "model.width": 3, "optimizer": "sgd"}, **states, "model": {"a": torch.ones(3)}}
    with pytest.raises(Incompatible, match=r"^model.width=3: must be 2 \(as when the snapshot was saved: its model"):
        check_form(wider, saved)
    other = {
        "chosen": {"model": "small", "model.width": 3, "optimizer": "adamw"},
        **states,
        "model": {},
        "stepper": {"c": 1},
    }
    with pytest.raises(Incompatible, match=r"^model=small: must be big \("):
        check_form(other, saved)


def test_a_run_keeps_its_sparsity() -> None:
    """Also where the state would fit. Its fields may change, and early versions saved none."""
    states = {"model": {"a": torch.ones(2)}, "stepper": {"b": 1}}
    saved = {"chosen": {"sparsity": "rigl", "sparsity.share": 0.8, "train.steps": 3}, **states}
    for option in ("magnitude", "none"):
        now = saved | {"chosen": {**saved["chosen"], "sparsity": option, "sparsity.share": 0.5}}
        with pytest.raises(Incompatible, match=rf"^sparsity={option}: must be rigl, with which this run was trained: "):
            check_form(now, saved)
        check_form(now, states)
    check_form(saved | {"chosen": {**saved["chosen"], "sparsity.share": 0.5, "train.steps": 5}}, saved)


def test_one_that_cannot_be_finished_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots = Snapshots(tmp_path, keep=1)
    snapshots.save(1, state_of(1))
    before = names(tmp_path)

    def half(state: Any, file: Any) -> None:
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(snapshot_module.torch, "save", half)
    with pytest.raises(OSError, match="No space left"):
        snapshots.save(2, state_of(2))
    assert names(tmp_path) == before


def test_what_a_killed_run_left_half_is_never_loaded_and_goes_with_the_next(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path, keep=2)
    snapshots.save(1, state_of(1))
    half = unfinished_name(tmp_path / "step_00000002.pt")
    half.write_bytes(b"half of it")
    found = snapshots.load()
    assert found is not None
    assert found["step"] == 1
    assert half.exists()
    snapshots.save(3, state_of(3))
    assert not half.exists()


STRANGE: dict[str, Callable[[Path], object]] = {
    "a folder": Path.mkdir,
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a pipe": os.mkfifo,
}


@pytest.mark.parametrize("make", STRANGE.values(), ids=STRANGE)
def test_what_only_has_the_name_of_one_is_passed_over_and_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Callable[[Path], object]
) -> None:
    """Nor does it push out the one that is sound."""
    folder = tmp_path / "snapshots"
    snapshots = Snapshots(folder, keep=1)
    snapshots.save(1, state_of(1))
    strange = [folder / f"step_00000009.{'0' * 16}.pt", folder / "step_00000008.pt"]
    for path in strange:
        make(path)
    newest = snapshots.save(2, state_of(2))
    found = snapshots.load()
    assert found is not None
    assert found["step"] == 2
    said = capsys.readouterr().out
    assert all(f"{path} is passed over" in said for path in strange)
    assert set(folder.iterdir()) == {newest, *strange}
    newest.unlink()
    assert not has_snapshots(tmp_path)
    assert snapshots.load() is None


def test_one_that_the_disk_does_not_give_back_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots = Snapshots(tmp_path, keep=2)
    paths = [snapshots.save(step, state_of(step)) for step in (1, 2)]

    def failing(path: Path) -> str:
        if path == paths[1]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return fingerprint(path)

    monkeypatch.setattr(snapshot_module, "fingerprint", failing)
    found = snapshots.load()
    assert found is not None
    assert found["step"] == 1


def test_the_one_before_goes_when_the_new_one_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes, then the name, then its folder; a disk that can't keep them leaves the one before."""
    snapshots = Snapshots(tmp_path, keep=1)
    first, fsync = snapshots.save(1, state_of(1)), os.fsync
    flushed: list[str] = []

    def noted(fd: int) -> None:
        assert first.exists()
        flushed.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        fsync(fd)

    def failing(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        snapshots.save(2, state_of(2))
    assert names(tmp_path) == [first.name]
    monkeypatch.setattr(os, "fsync", noted)
    second = snapshots.save(2, state_of(2))
    assert names(tmp_path) == [second.name]
    assert len(flushed) == 2
    assert flushed[0].endswith(".unfinished")
    assert flushed[1] == str(tmp_path)


class Trap:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("code was run",))


def test_loading_runs_no_code(tmp_path: Path) -> None:
    """Even where the hash is right."""
    snapshots = Snapshots(tmp_path, keep=2)
    snapshots.save(1, {"trap": Trap()})
    with pytest.raises(BadInput, match="1 of 1 here are none of lowvram's"):
        snapshots.load()


def test_forged_contents_with_the_right_hash_are_no_snapshots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one before is used; no code of theirs is run, and none ends in a traceback."""
    kept = Snapshots(tmp_path, 99).save(1, {"step": 1})

    def check(state: Any) -> None:
        assert state["step"] + 0 == state["step"]

    for step, value in enumerate([[1], None, {}, {"step": "2"}, 5, "text", torch.zeros(2)], start=2):
        file = tmp_path / "forged"
        torch.save(value, file)
        file.rename(tmp_path / f"step_{step:08d}.{fingerprint(file)}.pt")
    for step, text in ((10, b""), (11, b"x" * 99), (12, pickle.dumps(print, 2))):
        (tmp_path / "forged").write_bytes(text)
        (tmp_path / "forged").rename(tmp_path / f"step_{step:08d}.{fingerprint(tmp_path / 'forged')}.pt")
    assert Snapshots(tmp_path, 99).load(check) == {"step": 1, "run": None}
    assert capsys.readouterr().out.count("is no snapshot of lowvram's, whatever its hash says") == 10
    assert snapshots_in(tmp_path) == [kept]
