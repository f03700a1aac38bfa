"""One run, two machines that don't see each other's locks: the lease in its folder decides."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from lowvram.results.files.lease import LEASE
from lowvram.results.files.run_folder import snapshots_in
from tests.calls import TINY, read_row, wait_until
from tests.hosts import as_nfs, both, end

SFTP_SERVERS = (Path("/usr/lib/openssh/sftp-server"), Path("/usr/libexec/openssh/sftp-server"))
LONG_S = 600.0  # a bound on hangs, on a busy machine
ENDLESS = (*TINY, "mode=train", "train.steps=1000000", "snapshot.every_steps=5", "hydra.run.dir=out")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def files(folder: Path) -> dict[str, tuple[int, bytes]]:
    """All files in a folder, with their bytes and which files they are."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): (path.stat().st_ino, path.read_bytes()) for path in found}


@pytest.mark.slow
def test_a_run_whose_machine_sleeps_is_taken_over_and_wakes_up_to_write_nothing(
    tmp_path: Path, stack: ExitStack
) -> None:
    one, other = both(tmp_path)
    folder = one.cwd / "out"
    first = one.train(*ENDLESS)
    stack.callback(end, first)
    wait_until(lambda: snapshots_in(folder / "snapshots"), "a snapshot", LONG_S)

    refused = other.train("resume=out")  # while the first one runs
    stack.callback(end, refused)
    out, err = refused.communicate(timeout=LONG_S)
    assert refused.returncode == 3, out + err
    assert "must be a folder in which nobody else runs: process" in err
    assert "on node-a, which renewed its lease less than 1 s ago, does; wait for its end, stop it" in err
    assert first.poll() is None

    os.killpg(first.pid, signal.SIGSTOP)
    steps = int(snapshots_in(folder / "snapshots")[0].name[5:13]) + 3
    second = other.train("resume=out", f"train.steps={steps}")
    stack.callback(end, second)
    out, err = second.communicate(timeout=LONG_S)
    assert second.returncode == 0, out + err
    assert "on node-a has a lease there: watching for up to 8 s whether it is alive" in err
    assert read_row(folder)["status"] == "ok"
    assert not (folder / LEASE).exists()

    before = files(folder)
    os.killpg(first.pid, signal.SIGCONT)
    out, err = first.communicate(timeout=LONG_S)
    assert first.returncode == 75, out + err
    assert "another program has taken this folder over, as this program had not renewed its lease there" in err
    assert files(folder) == before


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """One folder as two machines see it: a file system of its own for each, without common locks."""
    sftp = next((path for path in SFTP_SERVERS if path.exists()), None)
    if sftp is None or shutil.which("sshfs") is None or not Path("/dev/fuse").exists():
        pytest.skip("no network's file system here: sshfs, sftp-server or /dev/fuse is missing (apt-get install sshfs)")
    server, started, seen = tmp_path / "server", tmp_path / "sftp", (tmp_path / "one", tmp_path / "other")
    started.write_text(f"#!/bin/sh\nexec {sftp}\n")  # in the place of ssh: there is no network
    started.chmod(0o755)
    try:
        for path in (server, *seen):
            path.mkdir()
        for path in seen:
            command = ["sshfs", "-o", f"ssh_command={started}", f"x:{server}", path]
            mounted = subprocess.run(command, capture_output=True, text=True, check=False)
            if mounted.returncode:
                pytest.skip(f"no network's file system here: {mounted.stderr}")
        yield seen
    finally:
        for path in seen:
            subprocess.run(["fusermount", "-u", "-z", path], capture_output=True, check=False)


CLAIM = """
import sys, time
from pathlib import Path
from lowvram.results.files import lease, renewal
from lowvram.runs import folders
lease.this_machine = lambda: lease.Machine(sys.argv[1], f"boot of {sys.argv[1]}", "pid:[1]")
renewal.BEAT_S, renewal.DEAD_S = 0.5, 5.0
claim = folders.claimed(Path(sys.argv[2]), "resume")
print("taken", flush=True)
input()
claim.release()
"""


def claim_from(name: str, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CLAIM, name, str(folder)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


@pytest.mark.medium
def test_on_a_real_file_system_of_a_network(mounts: tuple[Path, Path], stack: ExitStack) -> None:
    """Two programs see one folder each through its own mount."""
    folders = [mount / "run" for mount in mounts]
    first = claim_from("node-a", folders[0])
    stack.callback(end, first)
    assert first.stdout is not None
    assert first.stdout.readline() == "taken\n"
    refused = claim_from("node-b", folders[1])
    stack.callback(end, refused)
    assert f"process {first.pid} on node-a, which renewed its lease less than 1 s ago" in refused.communicate()[1]
    os.killpg(first.pid, signal.SIGSTOP)
    second = claim_from("node-b", folders[1])
    stack.callback(end, second)
    assert second.stdout is not None
    assert second.stdout.readline() == "taken\n"
    os.killpg(first.pid, signal.SIGCONT)
    assert first.wait(LONG_S) == 75
    assert f"process {second.pid} on node-b has taken this folder over" in first.communicate()[1]
    assert second.communicate("\n")[1].count("\n") == 1  # the line about the watch
    assert second.returncode == 0
    assert [path.name for path in (mounts[0].parent / "server" / "run").iterdir()] == [".lowvram"]


READ = """
import sys, time
from pathlib import Path
from lowvram.results.files import late
from lowvram.results.files.regular import fingerprint, read_regular
path = Path(sys.argv[1])
late.LATE_S = float(sys.argv[2])
print(path.exists(), late.is_there_in_time(path.exists, [path.parent]))
if path.exists():
    print(read_regular(path).decode(), fingerprint(path))
"""


@pytest.mark.parametrize(
    ("waits_s", "is_nfs", "said"),
    [
        (60.0, True, ["False", "True", "whole", "5d5766cf2d787016"]),
        (0.0, True, ["False", "False"]),
        (60.0, False, ["False", "False"]),
    ],
)
def test_what_is_seen_late_is_waited_for_on_a_network_alone(
    tmp_path: Path, waits_s: float, is_nfs: bool, said: list[str]
) -> None:
    """And then opened again after a stale handle."""
    one, _ = both(tmp_path)
    (one.cwd / "result.json").write_text("whole")
    env = {"LOWVRAM_NFS_LATE": "result.json", "LOWVRAM_NFS_STALE": "result.json", "LOWVRAM_NFS_LATE_S": "2"}
    env |= as_nfs(one.tmp, one.cwd) if is_nfs else {}
    reader = one.begin("-c", READ, str(one.cwd / "result.json"), str(waits_s), **env)
    out, err = reader.communicate(timeout=LONG_S)
    assert out.split() == said, err
