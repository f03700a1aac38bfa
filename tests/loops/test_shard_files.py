"""Snapshots in a folder, to which each rank has written its shards: whole or not there, and as safe as one file."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lowvram.compat.torch_trees import tree_leaves
from lowvram.config.errors import BadInput
from lowvram.core.mesh import all_ranks
from lowvram.core.shards import local, whole
from lowvram.loops import shard_files, snapshot
from lowvram.loops.shard_files import split_into_files
from lowvram.loops.snapshot import Snapshots, fingerprint, is_sound
from lowvram.results.files import late
from lowvram.results.files.run_folder import snapshots_in
from tests.ranks import CONTEXT, as_rank, on_ranks, one_rank_alone


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    with one_rank_alone():
        yield


def state_of(step: int) -> dict[str, Any]:
    """Sharded over all ranks: a weight that doesn't divide, one of a single row, and one that shares its memory."""
    mesh = init_device_mesh("cpu", (all_ranks().size,))
    values = {"a": torch.arange(21.0).view(7, 3) + step, "b": torch.full((1, 2), step, dtype=torch.float64)}
    model = {name: distribute_tensor(each, mesh, [Shard(0)]) for name, each in values.items()}
    mean = distribute_tensor(torch.ones(1, 3), mesh, [Replicate()])
    return {
        "step": step,
        "model": {**model, "tied": model["a"]},
        "stepper": {"state": {0: {"x": model["b"], "m": mean}}},
    }


def saved(folder: Path, step: int, keep: int = 2) -> Path:
    Snapshots(folder, keep, sharded_above_bytes=0).save_together(step, state_of(step), dict)
    return snapshots_in(folder)[0]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def loaded(folder: Path, keep: int = 2) -> dict[str, Any] | None:
    return Snapshots(folder, keep).load()


def assert_holds(state: dict[str, Any] | None, step: int) -> None:
    assert state is not None
    wanted, found = state_of(step), state
    assert found["step"] == step
    for one, other in zip(tree_leaves(wanted["model"]), tree_leaves(found["model"]), strict=True):
        assert torch.equal(whole(one), other)
    values = found["stepper"]["state"][0]
    assert torch.equal(values["x"], torch.full((1, 2), step, dtype=torch.float64))
    assert torch.equal(values["m"], torch.ones(1, 3))


def test_goes_round_and_the_newest_stay(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots"
    paths = [saved(folder, step) for step in (1, 2, 9, 10)]
    assert names(folder) == [path.name for path in paths[2:]]
    assert snapshots_in(folder) == paths[:1:-1]
    assert all(map(is_sound, paths[2:]))
    assert_holds(loaded(folder), 10)
    Snapshots(folder, keep=1).save(11, {"step": 11})  # of either form the older go
    assert [path.suffix for path in snapshots_in(folder)] == [".pt"]


def test_only_above_its_size(tmp_path: Path) -> None:
    num_bytes = 2 * 7 * 3 * 4 + 2 * 2 * 8
    for limit, suffix in ((num_bytes, ".pt"), (num_bytes - 1, ".shards")):
        path = Snapshots(tmp_path, 2, sharded_above_bytes=limit).save_together(1, state_of(1), dict)
        assert path is not None
        assert path.suffix == suffix
        path.rename(tmp_path / "kept")
        shutil.rmtree(tmp_path / "kept") if suffix == ".shards" else (tmp_path / "kept").unlink()


def shard_in(path: Path) -> Path:
    return sorted(path.glob("rank_*"))[0]


def turn_into_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a shard is cut": lambda path: shard_in(path).write_bytes(shard_in(path).read_bytes()[:-1]),
    "a bit of a shard": lambda path: shard_in(path).write_bytes(shard_in(path).read_bytes()[:-1] + b"!"),
    "a shard is gone": lambda path: shard_in(path).unlink(),
    "a shard is a pipe": lambda path: turn_into_pipe(shard_in(path)),
    "one shard too many": lambda path: shutil.copy(shard_in(path), path / "rank_00009.00000.safetensors"),
    "the state is cut": lambda path: (path / "state.pt").write_bytes((path / "state.pt").read_bytes()[:-9]),
    "another's state": lambda path: shutil.copy(path.parent / "other.pt", path / "state.pt"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_one_is_reported_and_the_one_before_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    folder = tmp_path / "snapshots"
    first, second = saved(folder, 1), saved(folder, 2)
    shutil.copy(first / "state.pt", folder / "other.pt")
    shutil.copytree(second, second.with_suffix(".damaged"))  # of an earlier time
    DAMAGE[damage](second)
    assert not is_sound(second)
    assert_holds(loaded(folder), 1)
    said = capsys.readouterr().out
    assert f"{second} is damaged" in said
    assert f"continuing from {first}" in said
    assert second.with_suffix(".damaged").is_dir()
    assert f"now {second.stem}.damaged2: " in said
    assert second.with_suffix(".damaged2").is_dir()


def test_what_is_not_ours_in_a_snapshot_stays(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots"
    first = saved(folder, 1, keep=1)
    (first / "notes.txt").write_text("mine")
    second = saved(folder, 2, keep=1)
    assert names(first) == ["notes.txt"]
    assert snapshots_in(folder) == [second]
    saved(folder, 3, keep=1)
    assert names(first) == ["notes.txt"]


# Functions, with the modules that call them, in the order in which a save calls them.
MOMENTS = [(shard_files, "flush"), (shard_files, "fingerprint"), (snapshot, "write_shards"), (torch, "save")]
MOMENTS += [
    (snapshot, "flush"),
    (snapshot, "settle_folder"),
    (snapshot, "remove_folder"),
    (shard_files, "remove_files"),
]
SETTLES = 5  # the moment at which the folder gets its name


@pytest.mark.medium
@pytest.mark.parametrize("is_after", [False, True])
def test_killed_at_any_moment_the_newest_whole_one_is_used(tmp_path: Path, is_after: bool) -> None:
    """And what is left over goes with the next."""
    for moment, (_, name) in enumerate(MOMENTS):
        folder = tmp_path / str(moment)
        saved(folder, 1, keep=1)
        child = CONTEXT.Process(
            target=as_rank, args=(0, 1, "gloo", tmp_path / f"store{moment}", die, (folder, moment, is_after))
        )
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL, name
        is_settled = moment > SETTLES or (moment == SETTLES and is_after)
        assert_holds(loaded(folder), 2 if is_settled else 1)
        third = saved(folder, 3, keep=1)
        assert names(folder) == [third.name], name


def die(folder: Path, moment: int, is_after: bool) -> None:
    """Save, and be killed before or after a function is called."""
    module, name = MOMENTS[moment]
    function = getattr(module, name)

    def call_and_die(*args: Any, **keywords: Any) -> None:
        if is_after:
            function(*args, **keywords)
        os.kill(os.getpid(), signal.SIGKILL)

    with patch.object(module, name, call_and_die):
        saved(folder, 2, keep=1)


class Trap:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("code was run",))


def test_a_folder_of_a_stranger_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With right hashes: a pickle in the state, and beside it torch's own format, which is one."""
    folder = tmp_path / "snapshots"
    saved(folder, 1, keep=9)
    for step, state in ((2, {"trap": Trap()}), (3, [1]), (4, {"files": 5}), (5, {"files": {"../x": "0"}})):
        made = folder / "made"
        made.mkdir()
        torch.save(state, made / "state.pt")
        made.rename(folder / f"step_{step:08d}.{fingerprint(made / 'state.pt')}.shards")
    assert_holds(loaded(folder, 9), 1)
    assert capsys.readouterr().out.count("going back to the one before") == 4


@pytest.mark.parametrize("text", [b"", b"x" * 99, b"\xff" * 8 + b"{}", (2).to_bytes(8, "little") + b"{}"])
def test_forged_shards_are_refused_in_a_sentence(tmp_path: Path, text: bytes) -> None:
    folder = tmp_path / "snapshots"
    path = saved(folder, 1)
    state = torch.load(path / "state.pt", weights_only=True)
    for name in state["files"]:
        (path / name).write_bytes(text)
        state["files"][name] = fingerprint(path / name)
    torch.save(state, path / "state.pt")
    path.rename(path.with_name(f"step_00000001.{fingerprint(path / 'state.pt')}.shards"))
    with pytest.raises(BadInput, match=rf"^resume='{tmp_path}': must be a run whose snapshot fits .* can't be read"):
        loaded(folder)


def test_a_full_disk_is_an_error_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one of torch's, which wraps those of its own calls. The snapshot before stays."""
    folder = tmp_path / "snapshots"
    first, fsync = saved(folder, 1, keep=1), os.fsync

    def fail(fd: int) -> None:
        if Path(f"/proc/self/fd/{fd}").readlink().suffix == ".safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        saved(folder, 2, keep=1)
    assert list(folder.iterdir()) == [first]


def test_files_are_small_and_hold_no_memory_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    model = state_of(1)["model"]
    assert split_into_files(model) == {"a": 1, "b": 1, "tied": 2}
    monkeypatch.setattr(shard_files, "FILE_BYTES", 90)
    assert split_into_files(model) == {"a": 1, "b": 2, "tied": 3}


# On several ranks


class Largest(TorchDispatchMode):
    """The most bytes that a tensor has on this rank."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor) and not leaf.is_meta]
        self.num_bytes = max([self.num_bytes, *(local(tensor).untyped_storage().nbytes() for tensor in tensors)])
        return made


def largest_while_saving(folder: Path, limit: float) -> int:
    mesh = init_device_mesh("cpu", (all_ranks().size,))
    weight = distribute_tensor(torch.randn(4096, 16), mesh, [Shard(0)])
    state = {"model": {"weight": weight}}
    with Largest() as largest:
        Snapshots(folder, 2, sharded_above_bytes=limit).save_together(1, state, dict)
    return largest.num_bytes


@pytest.mark.medium
def test_no_rank_gathers_a_weight_to_save_it(tmp_path: Path) -> None:
    whole_bytes = 4096 * 16 * 4
    assert on_ranks(largest_while_saving, tmp_path / "whole", float("inf"))[0] >= whole_bytes
    assert max(on_ranks(largest_while_saving, tmp_path / "shards", 0)) <= whole_bytes / 2


def save_on_a_disk_of_its_own(folder: Path) -> str:
    """Two snapshots; at the second one the second rank has another disk than the first."""
    snapshots = Snapshots(folder, keep=1, sharded_above_bytes=0)
    snapshots.save_together(1, state_of(1), dict)
    write, elsewhere = shard_files.write_shards, folder.with_name("another_disk")

    def write_elsewhere(folder: Path, *args: Any) -> dict[str, str]:
        elsewhere.mkdir(exist_ok=True)
        return write(folder if all_ranks().is_first else elsewhere, *args)

    with patch.object(snapshot, "write_shards", write_elsewhere):
        try:
            snapshots.save_together(2, state_of(2), dict)
        except OSError as error:
            return str(error)
    return "saved"


def write_where_nothing_is(folder: Path) -> str:
    try:
        shard_files.write_shards(folder, shard_files.apart(state_of(1)).shards, all_ranks().rank)
    except OSError as error:
        return type(error).__name__
    return "written"


@pytest.mark.medium
def test_a_rank_that_does_not_see_the_folder_makes_no_other(tmp_path: Path) -> None:
    assert on_ranks(write_where_nothing_is, tmp_path / "snapshots" / "step") == ["FileNotFoundError"] * 2
    assert not list(tmp_path.iterdir())


@pytest.mark.medium
def test_machines_that_share_no_folder_lose_no_snapshot(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots"
    first, _ = on_ranks(save_on_a_disk_of_its_own, folder)
    assert "written by another rank, and not seen by the first: share the folder between their machines" in first
    (path,) = snapshots_in(folder)
    assert path.name.startswith("step_00000001.")
    assert_holds(loaded(folder), 1)


def save_while_the_second_fails(folder: Path) -> str:
    snapshots = Snapshots(folder, keep=1, sharded_above_bytes=0)
    snapshots.save_together(1, state_of(1), dict)

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with patch.object(shard_files, "fingerprint", shard_files.fingerprint if all_ranks().is_first else fail):
        try:
            snapshots.save_together(2, state_of(2), dict)
        except (OSError, RuntimeError) as error:
            return type(error).__name__
    return "saved"


@pytest.mark.medium
def test_a_folder_that_a_rank_did_not_finish_is_never_whole(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots"
    ends = on_ranks(save_while_the_second_fails, folder)
    assert ends[1] == "OSError"
    assert ends[0] != "saved"
    (path,) = snapshots_in(folder)
    assert path.name.startswith("step_00000001.")
    assert_holds(loaded(folder), 1)


def come_late(folder: Path, unseen: Path) -> Callable[[Path], bool]:
    """While something is missing in a folder: each time one more file is seen, which another machine has written."""

    def see(_: Path) -> bool:
        folder.mkdir(exist_ok=True)
        for path in sorted(unseen.rglob("*.*")):
            there = folder / path.relative_to(unseen)
            if not there.exists():
                there.mkdir() if path.is_dir() else shutil.copyfile(path, there)
                break
        return True

    return see


def resume_where_the_second_sees_late(folder: Path, waits_s: float) -> str:
    """The second rank is on another machine, which has another folder here."""
    for step in (1, 2):
        Snapshots(folder / "first", keep=2, sharded_above_bytes=0).save_together(step, state_of(step), dict)
    shutil.copytree(folder / "first", folder / "unseen", dirs_exist_ok=True) if all_ranks().is_first else None
    all_ranks().gather(None)
    mine = folder / ("first" if all_ranks().is_first else "second")
    see = come_late(mine, folder / "unseen")
    with patch.object(late, "is_shared", see), patch.object(late, "LATE_S", waits_s):
        try:
            state = Snapshots(mine, keep=2).load()
        except BadInput as error:
            return str(error)
    assert state is not None
    assert torch.equal(state["model"]["a"], torch.arange(21.0).view(7, 3) + 2)
    return "resumed"


@pytest.mark.medium
def test_a_rank_on_another_machine_waits_for_the_snapshot_of_the_first(tmp_path: Path) -> None:
    assert on_ranks(resume_where_the_second_sees_late, tmp_path, 60.0) == ["resumed", "resumed"]
    first, second = on_ranks(resume_where_the_second_sees_late, tmp_path / "not shared", -1.0)
    assert first == "resumed"
    assert "must be a folder that all ranks see as the first one does: for rank 1 step_00000002." in second
    assert "isn't there: share the folder between the machines" in second
