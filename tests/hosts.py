"""Two machines on one, for tests: names of their own, and a folder that they share as on a network's file system whose
locks they don't see (hosts.c). Made by namespaces, so as root alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.calls import ROOT, environment
from tests.faults.shim import compiler

SOURCE = Path(__file__).with_suffix(".c")
BOOT = "/proc/sys/kernel/random/boot_id"
NAMED = f'hostname "$1" && mount --bind "$2" {BOOT} && shift 2 && exec "$@"'
# A program whose leases are renewed often, so that a dead one's is known soon.
QUICK = """
import runpy, sys
from lowvram.results.files import renewal
renewal.BEAT_S, renewal.DEAD_S = 0.5, 8.0
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def missing() -> str | None:
    """Why there can be no machines here; None if there can be."""
    if compiler() is None:
        return "no two machines here: there is no C compiler (cc)"
    made = subprocess.run(["unshare", "--uts", "--mount", "true"], capture_output=True, check=False)
    return "no two machines here: namespaces can't be made (root is needed)" if made.returncode else None


@dataclass
class Host:
    """A machine.

    Attributes:
        cwd: the shared folder, from which programs are started.
        env: more variables for its programs.
    """

    name: str
    cwd: Path
    tmp: Path
    env: Mapping[str, str] = field(default_factory=dict)

    def command(self, *words: str) -> list[str]:
        boot = self.tmp / f"boot of {self.name}"
        boot.write_text(f"{self.name}\n")
        return ["unshare", "--uts", "--mount", "sh", "-c", NAMED, "sh", self.name, str(boot), *words]

    def begin(self, *words: str, **env: str) -> subprocess.Popen[str]:
        """Start a Python program there, in a process group of its own."""
        env = {**environment(), "LD_PRELOAD": str(shim(self.tmp)), "LOWVRAM_NFS_FOLDER": str(self.cwd), **env}
        return subprocess.Popen(
            self.command(sys.executable, *words),
            cwd=self.cwd,
            env={**env, "PYTHONPATH": os.pathsep.join([str(ROOT), env["PYTHONPATH"]]), **self.env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def train(self, *words: str) -> subprocess.Popen[str]:
        return self.begin("-c", QUICK, str(ROOT / "train.py"), *words)


def shim(tmp: Path) -> Path:
    library, cc = tmp / "hosts.so", compiler()
    if not library.exists():
        assert cc is not None
        subprocess.run([cc, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, SOURCE, "-ldl"], check=True)
    return library


def as_nfs(tmp: Path, folder: Path) -> dict[str, str]:
    """Variables with which a program takes the file system of a folder for NFS."""
    device, table = os.stat(folder).st_dev, tmp / "mountinfo"  # noqa: PTH116
    table.write_text(f"1 0 {os.major(device)}:{os.minor(device)} / / rw - nfs4 server:/home rw\n")
    return {"LOWVRAM_NFS_MOUNTS": str(table)}


def both(tmp_path: Path) -> tuple[Host, Host]:
    """Two machines with a folder that they share; skips the test where there can be none."""
    if (why := missing()) is not None:
        pytest.skip(why)
    cwd, tmp = tmp_path / "shared", tmp_path / "hosts"
    cwd.mkdir()
    tmp.mkdir()
    return Host("node-a", cwd, tmp), Host("node-b", cwd, tmp)


def end(process: subprocess.Popen[str]) -> None:
    """With all of its processes."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
