"""One point over two machines: network namespaces with addresses of their own, and an agent of torchrun in each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.calls import ROOT, history, read_row, wait_until

pytestmark = pytest.mark.slow

NAMES = [f"lowvram{os.getpid()}{side}" for side in "ab"]
ADDRESSES = ["10.77.0.1", "10.77.0.2"]
WORDS = ("debug=measure", "logger=none", "mode=train", "sharding=ddp", "sharding.timeout_s=10", "device=cpu")
Agents = Callable[..., list[subprocess.Popen[bytes]]]
GRACE_S = 30.0  # the ranks' time limit, the time in which rank 0 may tell why, and a busy machine: 15 s on an idle one


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def inside(side: int, *words: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", NAMES[side], *words)


def processes(side: int) -> list[int]:
    return list(map(int, ip("netns", "pids", NAMES[side]).split()))


@pytest.fixture
def machines() -> Iterator[None]:
    """Two, with a cable between them. What still runs there ends with them."""
    try:
        for name in NAMES:
            ip("netns", "add", name)
        ip("link", "add", "card0", "netns", NAMES[0], "type", "veth", "peer", "name", "card1", "netns", NAMES[1])
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces can't be made here: {getattr(error, 'stderr', error)}")
    try:
        for side, address in enumerate(ADDRESSES):
            ip("-n", NAMES[side], "link", "set", "lo", "up")
            ip("-n", NAMES[side], "addr", "add", f"{address}/24", "dev", f"card{side}")
            ip("-n", NAMES[side], "link", "set", f"card{side}", "up")
        yield
    finally:
        for side, name in enumerate(NAMES):
            for process in processes(side):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            ip("netns", "del", name)


@pytest.fixture
def agents(machines: None, tmp_path: Path) -> Iterator[Agents]:
    """Starts one on each machine, with one rank."""
    started: list[subprocess.Popen[bytes]] = []
    yield lambda *words: started.extend(begun(tmp_path, words)) or started
    for agent in started:
        agent.kill()
        agent.wait()


def begun(cwd: Path, words: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    for side in range(2):
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={side}")
        where = ("--nproc-per-node=1", f"--master-addr={ADDRESSES[0]}", "--master-port=29511")
        command = inside(side, *torchrun, *where, str(ROOT / "train.py"), *WORDS, *words, "hydra.run.dir=out")
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": f"card{side}"}
        with (cwd / f"log{side}").open("wb") as log:
            yield subprocess.Popen(command, cwd=cwd, env=environment, stdout=log, stderr=log)


def test_two_machines_train_as_one_process(agents: Agents, tmp_path: Path) -> None:
    for agent in agents("train.steps=3"):
        assert agent.wait(200) == 0
    alone = [word for word in WORDS if not word.startswith("sharding")]
    subprocess.run([sys.executable, ROOT / "train.py", *alone, "train.steps=3", "hydra.run.dir=one"], cwd=tmp_path)
    lines = [history(tmp_path / name) for name in ("out", "one")]
    two, one = ([line["loss/train"] for line in each if "loss/train" in line] for each in lines)
    assert two == pytest.approx(one, rel=1e-5)
    assert read_row(tmp_path / "out")["status"] == "ok"


def agent_killed(agent: int, side: int) -> None:
    os.kill(agent, signal.SIGKILL)


def rank_killed(agent: int, side: int) -> None:
    (rank,) = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    os.kill(int(rank), signal.SIGKILL)


def machine_lost(agent: int, side: int) -> None:
    """As when it loses power: nobody there answers any more."""
    for process in processes(side):
        os.kill(process, signal.SIGSTOP)
    ip("-n", NAMES[side], "addr", "flush", "dev", f"card{side}")


def card_down(agent: int, side: int) -> None:
    """A machine that runs on, whose network card doesn't."""
    ip("-n", NAMES[side], "link", "set", f"card{side}", "down")


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("happens", [agent_killed, rank_killed, machine_lost, card_down])
def test_nobody_is_left_waiting(agents: Agents, tmp_path: Path, happens: Callable[[int, int], None], side: int) -> None:
    """All others end soon, and rank 0 leaves a row, unless it is what was lost."""
    started = agents("train.steps=100000", "snapshot.every_steps=3")
    folder = tmp_path / "out"
    wait_until(lambda: any(folder.glob("snapshots/*.pt")), "a snapshot", 200)
    happens(started[side].pid, side)
    began, others = time.monotonic(), [other for other in range(2) if other != side or happens is not machine_lost]
    wait_until(lambda: not any(map(processes, others)), "the end of all processes", GRACE_S)
    assert time.monotonic() - began < GRACE_S
    if happens is not machine_lost or side == 1:
        row = read_row(folder)
        assert row["status"] in ("interrupted", "error"), row["reason"]
        assert row["status"] == "interrupted" or "another rank has ended or hangs" in row["reason"]
