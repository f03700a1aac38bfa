"""Ways to call the command line. Words, rows and processes of a call are in tests/calls.py.

`train` starts `train.py` as a user would: some 3 seconds a call. `call` is for the many: the same program with real
children, but its own part runs inside pytest and all calls share one fork server, so it takes a fraction of a second.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hydra._internal.hydra import Hydra
from omegaconf import OmegaConf

from lowvram.cli import here
from lowvram.cli import main as cli
from lowvram.config import identity
from lowvram.knobs.allocator import M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
from lowvram.knobs.optimizer import low_bit
from lowvram.knobs.optimizer.low_bit import compiled_step
from lowvram.launch.client import Server
from tests.calls import FAULTS, ROOT, Outcome, Running, begin, killed_at_last
from tests.files_once import mode_of, read_once
from tests.laboratory import compiler_as_before
from tests.ranks import start_server
from tests.tiers import MEDIUM, STARTERS, check_cpu_s, cpu_s, sample, tell_long_tests

MANY_OBJECTS = 50_000  # some ten milliseconds of a collection
seen_files = set[Path]()  # files that a test has begun in

OmegaConf.load = staticmethod(read_once)  # Hydra reads some twenty files for each call, which takes longer than a run
Hydra.get_mode = mode_of

# On busy cores a second thread makes tiny steps take longer.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Compiled code of all tests, and of the processes that they start: a second run of the suite finds it there.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(ROOT / ".pytest_cache" / "inductor"))
os.environ["XDG_STATE_HOME"] = str(ROOT / ".pytest_cache" / "state")  # the key with which runs are signed
os.environ.setdefault("LOWVRAM_CACHE", str(ROOT / ".pytest_cache" / "lowvram"))  # the same of traces


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by mark
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    medium = {ROOT / "tests" / f"{name}.py" for name in MEDIUM}
    for item in items:
        if item.path in medium or STARTERS & set(item.fixturenames):
            item.add_marker("medium")
    sample(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Function) -> Iterator[None]:
    """Without what fixtures take, which several tests share."""
    before_s = cpu_s()
    yield
    check_cpu_s(item, cpu_s() - before_s)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    tell_long_tests(terminalreporter)


def pytest_runtest_setup(item: pytest.Function) -> None:
    """Each ledger and each trace collects garbage before it counts. What torch and the tests hold for good is most of
    what it would look through, and never garbage: the collector leaves it out from here on. Half of their time."""
    if item.path not in seen_files and len(gc.get_objects(generation=2)) > MANY_OBJECTS:
        gc.collect()
        gc.freeze()
    seen_files.add(item.path)  # to ask takes two milliseconds
    if "on_ranks" in item.function.__code__.co_names:
        start_server()


def pytest_unconfigure() -> None:
    """What is frozen is freed again: Triton 3.9 prints a page of what it calls leaked."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def updates_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizers of few bits compile for seconds for each shape of a parameter. What is no test of that runs the same
    code eagerly; tests/knobs/test_optimizer_low_bit.py compiles it."""

    def eager(optimizer: torch.optim.Optimizer) -> None:
        with torch.compiler.set_stance("force_eager"):
            compiled_step(optimizer)

    monkeypatch.setattr(low_bit, "compiled_step", eager)


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    """Such as that of offload=parameters: a process that is a rank can't plan for several."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def compiled_quickly() -> Iterator[None]:
    """Graphs of both directions are made and cut in two as always, but run operation by operation: the code that
    inductor writes takes many seconds, and has tests of its own in tests/knobs/test_compile.py."""
    with compiler_as_before(), torch.compiler.set_stance("default", force_backend="aot_eager"):
        yield


@pytest.fixture
def same_process_afterwards() -> Iterator[None]:
    """Knobs of the stage PROCESS really act."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 2**17)
    libc.mallopt(M_TRIM_THRESHOLD, 2**17)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Starts `train.py` with the words given, in `tmp_path` unless a `cwd` is given."""
    running: list[Running] = []

    def start_one(*words: str, cwd: Path = tmp_path, **kwargs: Any) -> Running:
        running.append(begin(*words, cwd=cwd, **kwargs))
        return running[-1]

    with killed_at_last(running):
        yield start_one


@pytest.fixture
def train(start: Callable[..., Running]) -> Callable[..., Outcome]:
    """Runs `train.py` with the words given, in `tmp_path` unless a `cwd` is given, to its end."""

    def run(*words: str, timeout_s: float = 60, **kwargs: Any) -> Outcome:
        return start(*words, **kwargs).end(timeout_s)

    return run


@dataclass(frozen=True)
class Borrowed:
    """The shared server as one call sees it, which is not to stop it."""

    run: Callable[..., Any]
    ask: Callable[..., Any]
    wait_until_ready: Callable[..., None]
    disturbs: None = None
    is_fresh: bool = True

    def start(self) -> None: ...

    def stop(self) -> None: ...


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Server]:
    server = Server()
    with pytest.MonkeyPatch.context() as patched:  # its children act faults on demand
        patched.setenv("PYTHONPATH", str(FAULTS), prepend=os.pathsep)
        server.wait_until_ready(lambda: None)
    yield server
    server.stop()


@pytest.fixture
def call(
    tmp_path: Path, shared_server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Outcome]]:
    """Like `train`, in a fraction of the time. Paths of data must be absolute: the children live in another folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(FAULTS), prepend=os.pathsep)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(logging, "raiseExceptions", True)
    if "wandb" in sys.modules:  # it keeps the settings of whatever test first used it in this process
        sys.modules["wandb"].teardown()
    borrowed = Borrowed(shared_server.run, shared_server.ask, shared_server.wait_until_ready)
    monkeypatch.setattr(here, "Server", lambda: borrowed)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(*words: str) -> Outcome:
        identity.started.cache_clear()
        monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        monkeypatch.setattr(sys, "orig_argv", [sys.executable, str(ROOT / "train.py"), *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Outcome(ended.value.code, said.out, said.err, tmp_path)

    yield run
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def in_double() -> Iterator[None]:
    """Tensors are fp64 unless they are told otherwise."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)
