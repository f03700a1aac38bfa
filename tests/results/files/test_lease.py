"""The lease of a run's folder, between machines whose locks don't see each other. No NFS is needed: a machine is what
tells its name, and its locks are switched off."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lowvram.config.errors import BadInput
from lowvram.results.files import lease, renewal
from lowvram.results.files.claim import Claim, Held
from lowvram.results.files.durable import remove_leftovers, unfinished_name, write_text
from lowvram.results.files.lease import LEASE, Lease, Machine, TakenOver, found_at
from lowvram.results.files.marker import MARKER
from lowvram.results.files.renewal import Keeper, OwnLease, Taken, Watch
from lowvram.results.files.run_folder import Kind
from lowvram.runs import folders

On = Callable[[str], None]
LOST: list[str] = []


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Seconds are shorter; what this process holds is forgotten at the end."""
    for module in (renewal, folders):
        monkeypatch.setattr(module, "DEAD_S", 1.5)
        monkeypatch.setattr(module, "LOOK_S", 0.05)
    monkeypatch.setattr(renewal, "BEAT_S", 0.1)
    monkeypatch.setattr(renewal, "_keeper", Keeper())
    LOST.clear()
    yield
    renewal._keeper._held.clear()
    lease._ours.clear()


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> On:
    """What is done next is done on this machine, which doesn't see the locks of others."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    return lambda name: monkeypatch.setattr(lease, "this_machine", lambda: Machine(name, f"boot of {name}", "pid:[1]"))


def taken(folder: Path) -> Claim:
    return Claim(folder, Kind.RUN, "the.key", on_lost=LOST.append)


def die(claim: Claim) -> None:
    """As by SIGKILL, or with the machine: nothing is renewed or given back."""
    assert claim.lease is not None
    renewal._keeper.remove(claim.lease)
    os.close(claim.fd)


def lease_in(folder: Path) -> Lease:
    found = found_at(folder / LEASE)
    assert found is not None
    assert found.lease is not None
    return found.lease


def test_a_lease_is_there_as_long_as_its_folder_is_taken(tmp_path: Path) -> None:
    claim = taken(tmp_path / "run")
    assert lease_in(tmp_path / "run").pid == os.getpid()
    assert json.loads((tmp_path / "run" / MARKER).read_text())["lease"] == lease_in(tmp_path / "run").token
    claim.release()
    assert [path.name for path in (tmp_path / "run").iterdir()] == [MARKER]
    taken(tmp_path / "new").undo()
    assert not (tmp_path / "new").exists()


def test_a_folder_of_an_earlier_version_is_taken_as_before(tmp_path: Path, on: On) -> None:
    on("a")
    (tmp_path / MARKER).write_text(json.dumps({"lowvram": "1", "kind": "run", "owner": None}))
    taken(tmp_path).release()


def test_a_slow_program_on_another_machine_is_not_taken_for_dead(
    tmp_path: Path, on: On, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever its clock says: here it is hours late."""
    monkeypatch.setattr(lease, "now_in_words", lambda: "1999-12-31 23:59:59 UTC")
    on("a")
    claim = taken(tmp_path)
    on("b")
    sentence = rf"process {os.getpid()} on a, which renewed its lease less than 0\.05 s ago, does; wait for its end"
    with pytest.raises(Held, match=sentence):
        folders.claimed(tmp_path, "resume")
    assert f"process {os.getpid()} on a has a lease there: watching for up to 1.5 s" in capsys.readouterr().err
    assert claim.lease is not None
    assert lease_in(tmp_path).token == claim.lease.token
    assert not LOST
    claim.release()


def test_who_is_asked_to_stop_watches_no_longer(tmp_path: Path, on: On, monkeypatch: pytest.MonkeyPatch) -> None:
    on("a")
    die(taken(tmp_path))
    on("b")
    monkeypatch.setattr(folders, "stop_signals", lambda: 1)
    with pytest.raises(Held, match="on a, which hasn't renewed its lease for 0 s or more, does"):
        folders.claimed(tmp_path, "resume")


def test_who_knows_that_the_other_lives_does_not_watch(tmp_path: Path, on: On) -> None:
    """As its queue says so."""
    on("a")
    die(taken(tmp_path))
    on("b")
    with pytest.raises(Held) as held:
        folders.claimed(tmp_path, "resume", is_known=lambda: True)
    assert held.value.is_unsure


def test_a_dead_program_on_another_machine_is_replaced_and_writes_no_more(tmp_path: Path, on: On) -> None:
    """It wasn't dead, but suspended."""
    on("a")
    first = taken(tmp_path)
    for name in ("events.jsonl", "native.1.log", "mine.log"):
        (tmp_path / name).write_text("as it was\n")
    inodes = {path.name: path.stat().st_ino for path in tmp_path.iterdir() if path.name != LEASE}
    write_text(tmp_path / "result.json", "the first one's")
    appended = os.open(tmp_path / "events.jsonl", os.O_WRONLY | os.O_APPEND)
    die(first)
    on("b")
    second = folders.claimed(tmp_path, "resume")
    assert lease_in(tmp_path).host == "b"
    write_text(tmp_path / "result.json", "the second one's")
    left = unfinished_name(tmp_path / "result.json")
    left.touch()
    assert first.lease is not None
    lease.guard(tmp_path, first.lease.token)  # as in the first one's processes
    with pytest.raises(TakenOver, match="another program has taken this folder over"):
        write_text(tmp_path / "result.json", "the first one's again")
    with pytest.raises(TakenOver):
        remove_leftovers(tmp_path)
    assert left.exists()
    os.write(appended, b"too late\n")
    os.close(appended)
    assert (tmp_path / "events.jsonl").read_text() == "as it was\n"
    changed = {name for name, inode in inodes.items() if (tmp_path / name).stat().st_ino != inode}
    assert changed == {"events.jsonl", "native.1.log"}
    first.lease.renew()
    (said,) = LOST
    assert f"{tmp_path}: process {os.getpid()} on b has taken this folder over" in said
    first.lease.release()
    assert lease_in(tmp_path).host == "b"
    assert (tmp_path / "result.json").read_text() == "the second one's"
    lease.guard(tmp_path, lease_in(tmp_path).token)
    second.release()


def test_who_comes_back_after_the_other_has_ended_writes_no_more_either(tmp_path: Path, on: On) -> None:
    on("a")
    first = taken(tmp_path)
    die(first)
    on("b")
    folders.claimed(tmp_path, "resume").release()
    assert not (tmp_path / LEASE).exists()
    assert first.lease is not None
    assert not lease.is_ours(tmp_path, first.lease.token)
    first.lease.renew()
    assert "another program has taken this folder over" in LOST[0]
    assert not (tmp_path / LEASE).exists()


def test_a_lease_that_its_user_removes_is_made_again(tmp_path: Path) -> None:
    claim = taken(tmp_path / "run")
    assert claim.lease is not None
    (tmp_path / "run" / LEASE).unlink()
    assert lease.is_ours(tmp_path / "run", claim.lease.token)
    claim.lease.renew()
    assert lease_in(tmp_path / "run").token == claim.lease.token
    shutil.rmtree(tmp_path / "run")
    claim.lease.renew()
    assert not (tmp_path / "run").exists()
    assert not LOST


def test_a_killed_program_of_this_machine_is_replaced_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (renewal, folders):
        monkeypatch.setattr(module, "DEAD_S", 1e9)
    text = "from lowvram.results.files.claim import *; import os, sys; from pathlib import Path"
    text += "; c = Claim(Path(sys.argv[1]), Kind.RUN, 'x'); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", text, str(tmp_path)], check=False)
    assert lease_in(tmp_path).pid != os.getpid()
    claim = folders.claimed(tmp_path, "resume")
    assert lease_in(tmp_path).pid == os.getpid()
    shutil.copytree(tmp_path, tmp_path / "copy")
    taken(tmp_path / "copy").release()  # whose lease names a process that lives, but in another folder
    claim.release()


def test_without_locks_the_lease_decides_about_other_machines(
    tmp_path: Path, on: On, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    on("a")
    monkeypatch.setattr("socket.gethostname", lambda: "a")
    die(taken(tmp_path))
    on("b")
    monkeypatch.setattr("socket.gethostname", lambda: "b")
    folders.claimed(tmp_path, "resume").release()


def test_a_full_disk_leaves_an_owner_alive(tmp_path: Path, on: On, monkeypatch: pytest.MonkeyPatch) -> None:
    on("a")
    claim = taken(tmp_path)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(renewal.os, "pwrite", full)
    on("b")
    with pytest.raises(Held, match="which renewed its lease"):
        folders.claimed(tmp_path, "resume")
    monkeypatch.undo()
    claim.release()


def test_a_failing_disk_ends_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = taken(tmp_path)
    assert claim.lease is not None

    def fail(*_: Any, **__: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for name in ("pwrite", "utime"):
        monkeypatch.setattr(renewal.os, name, fail)
    claim.lease.renew()
    monkeypatch.setattr(renewal.os, "open", fail)
    claim.lease.renew()
    assert not LOST


def test_a_full_disk_at_the_start_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(renewal.os, "write", full)
    with pytest.raises(OSError, match="No space left on device") as told:
        taken(tmp_path / "run")
    assert LEASE in str(told.value.filename)
    assert not (tmp_path / "run").exists()


def test_a_strangers_lease_does_not_steer_the_terminal(tmp_path: Path, on: On) -> None:
    on("a")
    forged = {**vars(Lease.mine(tmp_path)), "host": "\x1b[2J" + 999 * "x"}
    (tmp_path / LEASE).write_text(json.dumps(forged))
    on("b")
    with pytest.raises(Held) as held:
        taken(tmp_path)
    assert r"on \x1b[2Jx" in held.value.who
    assert len(held.value.who) < 400
    (tmp_path / LEASE).write_text(json.dumps({**forged, "token": "../../elsewhere"}))
    assert lease.found_at(tmp_path / LEASE).lease is None  # pyright: ignore[reportOptionalMemberAccess]


def test_where_no_thread_can_be_started_there_is_no_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refuse)
    claim = taken(tmp_path)
    assert not (tmp_path / LEASE).exists()
    write_text(tmp_path / "result.json", "mine")
    claim.release()


@pytest.mark.parametrize("left", ["{}", "mine", '{"token": 3}'])
def test_a_strangers_file_is_no_lease_and_stays(tmp_path: Path, left: str) -> None:
    (tmp_path / LEASE).write_text(left)
    with pytest.raises(BadInput, match=f"a folder whose {LEASE} can be read: it is damaged or somebody else's"):
        taken(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {LEASE: left}


@pytest.mark.parametrize("left", ["", "\0" * 1024])
def test_what_is_no_lease_yet_is_watched_before_it_is_replaced(tmp_path: Path, on: On, left: str) -> None:
    (tmp_path / LEASE).write_text(left)
    on("b")
    with pytest.raises(Held, match="another program, which hasn't renewed its lease"):
        taken(tmp_path)
    folders.claimed(tmp_path, "resume").release()


def test_without_hard_links_a_lease_is_made_at_its_place(
    tmp_path: Path, on: On, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    on("a")
    die(taken(tmp_path))
    on("b")
    with pytest.raises(Held):
        taken(tmp_path)
    folders.claimed(tmp_path, "resume").release()
    assert [path.name for path in tmp_path.iterdir()] == [MARKER]


def test_what_a_program_leaves_that_dies_while_it_takes_over_is_replaced_too(tmp_path: Path, on: On) -> None:
    on("a")
    die(taken(tmp_path))
    on("c")
    successor = OwnLease(tmp_path, LOST.append)
    successor._place(unfinished_name(successor.path), tmp_path / f"{LEASE}.{lease_in(tmp_path).token}")
    on("b")
    folders.claimed(tmp_path, "resume").release()
    assert [path.name for path in tmp_path.iterdir()] == [MARKER]


TAKER = """
import os, sys, time
from pathlib import Path
from lowvram.results.files import lease, renewal
from lowvram.results.files.renewal import OwnLease, Taken, Watch
name = sys.argv[1]
lease.this_machine = lambda: lease.Machine(name, f"boot of {name}", "pid:[1]")
folders = [Path(sys.argv[2], str(number)) for number in range(int(sys.argv[3]))]
dead = [lease.found_at(folder / lease.LEASE) for folder in folders]
print("ready", flush=True)
began = float(input())
for number, (folder, seen) in enumerate(zip(folders, dead)):
    watch = Watch(folder)
    watch._known[folder / lease.LEASE] = (seen.mark, time.monotonic() - 1e6)  # it has watched for long
    own = OwnLease(folder, print)
    while time.monotonic() < began + 0.02 * number:
        pass
    try:
        own.take(watch)
        print(number, own.token, flush=True)
    except Taken:
        pass
"""


def test_of_two_that_take_over_at_once_one_succeeds(tmp_path: Path, on: On) -> None:
    num = 50
    on("dead")
    for number in range(num):
        (tmp_path / str(number)).mkdir()
        OwnLease(tmp_path / str(number), LOST.append).take(Watch(tmp_path / str(number)))
    command = [sys.executable, "-c", TAKER]
    both = [
        subprocess.Popen([*command, name, str(tmp_path), str(num)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for name in "ab"
    ]
    for each in both:
        assert each.stdout is not None
        assert each.stdout.readline() == b"ready\n"
    began = f"{time.monotonic() + 0.5}\n".encode()
    for each in both:
        assert each.stdin is not None
        each.stdin.write(began)
        each.stdin.flush()
    won = [line.split() for each in both for line in each.communicate()[0].decode().splitlines()]
    assert sorted(int(number) for number, _ in won) == list(range(num))
    for number, token in won:
        assert lease_in(tmp_path / number).token == token
        assert [path.name for path in (tmp_path / number).iterdir()] == [LEASE]


def test_a_fork_gives_back_nothing_of_its_parents(tmp_path: Path) -> None:
    claim = taken(tmp_path)
    if (child := os.fork()) == 0:
        try:
            assert claim.lease is not None
            claim.lease.release()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert lease_in(tmp_path).pid == os.getpid()
    claim.release()


def test_taken_says_whether_it_is_sure() -> None:
    assert Taken("process 1 on a", is_unsure=True).is_unsure


def test_of_a_sweep_the_leftovers_of_other_machines_stay(
    tmp_path: Path, on: On, monkeypatch: pytest.MonkeyPatch
) -> None:
    on("a")
    monkeypatch.setattr("socket.gethostname", lambda: "a")
    first = Claim(tmp_path, Kind.SWEEP, "hydra.sweep.dir")
    left = unfinished_name(tmp_path / "table.md")
    left.touch()
    on("b")
    monkeypatch.setattr("socket.gethostname", lambda: "b")
    second = Claim(tmp_path, Kind.SWEEP, "hydra.sweep.dir")
    assert left.exists()
    on("a")
    monkeypatch.setattr("socket.gethostname", lambda: "a")
    first.undo()
    assert (tmp_path / MARKER).exists()
    second.release()
