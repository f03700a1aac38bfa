"""A point of several ranks: one row whatever becomes of them, the rank to blame named, and nothing that stays."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch

from lowvram.launch.client import Server
from tests.calls import (
    ROOT,
    TINY,
    Outcome,
    Running,
    begin,
    children,
    environment,
    goes_on,
    history,
    killed_at_last,
    wait_until,
)
from tests.refusals import refusal
from tests.tiers import first_of

Call = Callable[..., Outcome]
Start = Callable[..., Running]
TWO = (*TINY, "sharding=ddp", "sharding.ranks=2", "device=cpu")
LONG = (*TWO, "train.steps=900", "name=slow")  # of 0.2 s each

# Before step 2 of one rank of the point with seed 1, 2, ... -> the point's status, a part of its reason
FAULTS = {
    "raise@2.1": ("error", "rank 1: ValueError: the model is broken"),
    "kill@2.0": ("killed", "rank 0: the process died of SIGKILL"),
    "out_of_memory@2.1": ("oom", "rank 1: out of memory in "),
}
SOUND = len(FAULTS) + 1
DEATHS = {  # tests/launch/test_outcome.py tells them apart without processes
    "segfault@2.1": ("error", "rank 1: the process died of SIGSEGV (see native.1.log)"),
    "exit17@2.0": ("error", "rank 0: the process ended by itself with exit code 17"),
    "bad_alloc@2.1": (
        "oom",
        "rank 1: out of memory in native code (see native.1.log); the optimizer's state is 41 % of the peak: "
        "try optimizer=adamw_8bit or ckpt=every1",
    ),
}


@pytest.fixture(scope="module")
def faulty_sweep(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Outcome, Running]]:
    """Every fault once, then a point without any."""
    name = name_of(FAULTS)
    call = begin("-m", *TWO, f"seed=range(1,{SOUND + 1})", name, cwd=tmp_path_factory.mktemp("faults"))
    with killed_at_last([call]):
        yield call.end(120), call


def name_of(faults: Mapping[str, tuple[str, str]]) -> str:
    """The word with which each point of a sweep has its fault."""
    return "name=" + "+".join(f"{seed}.{fault}" for seed, fault in enumerate(faults, start=1))


def check_rows(outcome: Outcome, faults: Mapping[str, tuple[str, str]]) -> None:
    """Each says which rank failed, and how."""
    for number, (status, reason) in enumerate(faults.values(), start=1):
        row = outcome.rows[f"seed{number}"]
        assert row["status"] == status, row["reason"]
        assert reason in row["reason"]
        assert [each["rank"] for each in row["ranks"]] == [0, 1]


def test_the_rank_that_failed_is_named(faulty_sweep: tuple[Outcome, Running]) -> None:
    check_rows(faulty_sweep[0], FAULTS)


@pytest.mark.slow
def test_the_rank_that_died_is_named(call: Call) -> None:
    check_rows(call("-m", *TWO, f"seed=range(1,{len(DEATHS) + 1})", name_of(DEATHS)), DEATHS)


def test_only_what_failed_is_reported_and_nothing_stays(faulty_sweep: tuple[Outcome, Running]) -> None:
    """Not what it has broken on the other ranks."""
    outcome, call = faulty_sweep
    assert outcome.statuses[f"seed{SOUND}"] == "ok", outcome.said()
    assert outcome.code == 1
    assert outcome.err == ""
    assert outcome.out.count("Traceback") == 1
    assert "gloo" not in outcome.out
    call.wait_until_gone()


def test_advice_after_running_out_of_memory_is_for_what_one_rank_holds(faulty_sweep: tuple[Outcome, Running]) -> None:
    row = faulty_sweep[0].rows[f"seed{len(FAULTS)}"]
    assert row["plan"]["by_kind"]["activations"] > 0
    assert "% of the peak: try " in row["reason"]


def test_the_row_has_the_largest_peak_and_each_rank_s(faulty_sweep: tuple[Outcome, Running]) -> None:
    row = faulty_sweep[0].rows[f"seed{SOUND}"]
    peaks = [each["peak_bytes"] for each in row["ranks"]]
    assert len(peaks) == 2
    assert row["memory"]["peak_bytes"] == max(peaks) > 0
    assert all(each["process_peak_bytes"] > 0 for each in row["ranks"])
    lines = history(next(f for f in faulty_sweep[0].folders if f.name == row["id"]))
    assert [line["step"] for line in lines if "loss/train" in line] == [1, 2, 3]  # of one rank


@pytest.mark.parametrize(("sharding", "rank"), first_of([("fsdp", 1), ("fsdp", 0), ("ddp", 1), ("ddp", 0)]))
def test_a_rank_that_fails_loses_no_step(call: Call, tmp_path: Path, sharding: str, rank: int) -> None:
    """The others wait for it then, until it is gone: whoever fails last saves what all had."""
    words = (*TINY, f"sharding={sharding}", "sharding.ranks=2", "device=cpu", "train.steps=5", "hydra.run.dir=run")
    outcome = call(*words, f"name=raise@4.{rank}")
    assert outcome.row["reason"] == f"rank {rank}: ValueError: the model is broken"
    (snapshot,) = outcome.folder.glob("snapshots/*")
    assert snapshot.name.startswith("step_00000003.")
    assert not list(outcome.folder.glob(".*.unfinished"))
    again = call(*outcome.command("continue with"), "name=null")
    assert again.code == 0, again.said()
    assert [line["step"] for line in history(again.folder) if "loss/train" in line] == [1, 2, 3, 4, 5]


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["lora", "qlora"])
def test_adapters_learn_on_two_ranks_what_they_learn_on_one(call: Call, adapter: str) -> None:
    words = ("-m", *TINY, "device=cpu", f"adapter={adapter}", "stepping.clip=1.0", "optimizer.lr=0.01")
    alone = call(*words, "sharding=none")
    (losses,) = [history(folder) for folder in alone.folders]
    both = call(*words, "sharding=ddp,fsdp", "sharding.ranks=2", "hydra.sweep.dir=both")
    assert both.code == 0, both.said()
    for folder in both.cwd.glob("both/*/"):
        for one, other in zip(losses, history(folder), strict=True):
            assert other == pytest.approx(one, rel=1e-4)


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_ended(start: Start, tmp_path: Path) -> None:
    """Stopped as by Ctrl-Z in the middle of the three ranks, in a loop without end, and before the first step. All at
    once: they wait, they don't work."""
    words = {
        "stop": ("name=stop@2.1", "sharding.ranks=3", "train.batch_size=6"),
        "spin": ("name=spin@2.0",),
        "hang": ("name=hang@0.1",),
    }
    for folder in words:
        (tmp_path / folder).mkdir()
    calls = {
        folder: start(*TWO, *more, "sharding.timeout_s=3", cwd=tmp_path / folder) for folder, more in words.items()
    }
    for folder, call in calls.items():
        outcome = call.end()
        assert outcome.code == 1, outcome.said()
        assert outcome.row["status"] == "killed", outcome.said()
        named = f"rank {0 if folder == 'spin' else 1}: the others waited for it longer than sharding.timeout_s=3"
        assert outcome.row["reason"].startswith(named), outcome.said()
        assert "Traceback" not in outcome.out + outcome.err
        call.wait_until_gone(1)
    assert "was suspended (SIGSTOP)" in Outcome(1, "", "", tmp_path / "stop").row["reason"]


@pytest.mark.slow
def test_ctrl_c_ends_all_ranks_after_the_same_step(start: Start, call: Call) -> None:
    """And what is printed goes on."""
    running = start(*LONG)
    in_steps(running, 2)
    running.signal_group()
    outcome = running.end()
    running.wait_until_gone(2)
    goes_on(outcome, call)


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all(start: Start) -> None:
    running = start(*LONG)
    in_steps(running, 2)
    subprocess.run(["kill", "-TERM", str(children(running.server())[1])], check=True)
    outcome = running.end()
    assert outcome.code == 75, outcome.said()
    assert outcome.row["reason"] == f"stopped after step {len(history(outcome.folder))} of 900"


@pytest.mark.slow
def test_ctrl_c_twice_kills_all_ranks(start: Start) -> None:
    call = start(*TWO, "name=hang@2.1")
    in_steps(call, 1)
    time.sleep(1)  # on a busy machine the rank may not hang yet: then the first signal would end it
    call.signal_group()
    with pytest.raises(subprocess.TimeoutExpired):
        call.process.wait(1)
    call.signal_group()
    outcome = call.end(5)
    assert outcome.code == 75
    assert outcome.row["reason"] == "killed by a second signal before it could save"
    call.wait_until_gone(1)


@pytest.mark.slow
def test_ctrl_c_while_the_ranks_are_set_up(start: Start) -> None:
    """One of them hangs there; the other waits for it, and must hear the signal."""
    call = start(*TWO, "name=hang@0")
    wait_until(lambda: len(children(call.server())) == 2, "two ranks")
    call.signal_group()
    outcome = call.end(10)
    assert outcome.code == 75, outcome.said()
    assert outcome.row["reason"].startswith("stopped")
    call.wait_until_gone(1)


@pytest.mark.slow
def test_no_rank_outlives_the_program(start: Start) -> None:
    call = start(*LONG)
    in_steps(call, 1)
    call.process.kill()
    call.wait_until_gone()
    assert len(list(call.end().folder.glob("snapshots/step_*.pt"))) == 1


@pytest.mark.slow  # quicker: test_a_point_is_killed_beside_its_workers in tests/launch/test_faults.py
def test_nothing_is_left_of_a_rank_that_is_killed_beside_its_workers(call: Call, shared_server: Server) -> None:
    outcome = call(*TWO, "loader=workers", "train.steps=9", "name=kill@2.1")
    assert outcome.row["reason"] == "rank 1: the process died of SIGKILL"
    assert shared_server._process is not None
    assert children(shared_server._process.pid) == []


REFUSED = {
    "sharding=none": "sharding=none needs that the point has one rank: it has 2: choose sharding=ddp",
    "sharding.ranks=auto": "sharding=ddp needs that the point has several ranks: it has one: say sharding.ranks=2",
}
WRONG = {
    "sharding.ranks=0": "sharding.ranks='0': must be auto or at least 1",
    "sharding.ranks=many": "sharding.ranks='many': must be auto or at least 1",
    "sharding.timeout_s=0": "sharding.timeout_s=0.0: must be more than 0 seconds",
    "train.batch_size=3 accum=x2": "at least 4 (ranks x accum.parts = 2 x 2), a sample for each part: choose fewer",
    "sharding.ranks=999999999": "must be at least 999999999 (ranks",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused(call: Call, words: str) -> None:
    outcome = call(*TWO, *words.split())
    assert REFUSED[words] in outcome.sentence
    assert list(outcome.cwd.iterdir()) == []


def test_what_is_wrong_in_the_number_of_ranks(subtests: pytest.Subtests) -> None:
    for words, sentence in WRONG.items():
        with subtests.test(words):
            assert sentence in refusal(*TWO, *words.split())


def in_steps(call: Running, num_steps: int) -> None:
    """Wait until some steps are made."""
    call.wait_for("started")
    (file,) = call.cwd.glob("**/metrics.jsonl")
    wait_until(lambda: len(file.read_text().splitlines()) >= num_steps, f"{num_steps} steps")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_each_rank_takes_a_card(call: Call) -> None:
    """Through NCCL; one more rank than there are cards is refused."""
    num_cards = torch.cuda.device_count()
    words = (*TINY, "sharding=ddp", f"train.batch_size={num_cards * (num_cards + 1)}")
    refused = call(*words, f"sharding.ranks={num_cards + 1}").sentence
    assert f"must be at most {num_cards}, the number of visible CUDA devices" in refused
    if num_cards == 1:
        pytest.skip("one card holds one rank")
    outcome = call(*words)
    assert outcome.code == 0, outcome.said()
    assert len(outcome.row["ranks"]) == num_cards
    assert all(each["peak_bytes"] > 0 for each in outcome.row["ranks"])


# torchrun


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the first of two programs that torchrun has started."""
    told = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    for name, value in told.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.usefixtures("launched")
def test_under_torchrun_the_ranks_are_those_that_it_has_started(call: Call) -> None:
    allowed = "sharding.ranks='3': must be auto or 2, the number of ranks that torchrun has started"
    assert call(*TWO, "sharding.ranks=3", "train.batch_size=6").sentence == allowed
    allowed = "devices=3: must be null or 2, the number of ranks that torchrun has started"
    assert call(*TWO, "devices=3", "train.batch_size=6").sentence == allowed


@pytest.mark.usefixtures("launched")
def test_under_torchrun_there_is_no_sweep(call: Call) -> None:
    assert call("-m", *TWO, "seed=1,2").sentence.startswith("-m under torchrun: start a sweep without it")
    assert call(*TINY, "sweep=optimizers").sentence.startswith("-m under torchrun")


def torchrun(*words: str, cwd: Path) -> Outcome:
    """Two programs."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    env = {**environment(), "OMP_NUM_THREADS": "1", "TMPDIR": str(cwd.parent)}
    words = (*command, str(ROOT / "train.py"), *TINY, "sharding=ddp", "device=cpu", *words)
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=60)
    return Outcome(done.returncode, done.stdout, done.stderr, cwd)


@pytest.mark.slow
def test_torchrun_starts_the_ranks(tmp_path: Path, call: Call) -> None:
    """One program records, the other says nothing and leaves nothing; losses are those of a point of two ranks."""
    (tmp_path / "torchrun").mkdir()
    outcome = torchrun("name=Mine", cwd=tmp_path / "torchrun")
    assert outcome.code == 0, outcome.said()
    assert outcome.out.count("Mine: ok") == 1
    assert len(outcome.folders) == 1
    row = outcome.row
    assert row["status"] == "ok"
    assert row["memory"]["peak_bytes"] == max(each["peak_bytes"] for each in row["ranks"])
    assert [each["rank"] for each in row["ranks"]] == [0, 1]
    assert not list(tmp_path.glob("lowvram-rank*"))
    assert history(outcome.folder) == history(call(*TWO).folder)


@pytest.mark.slow
def test_a_rank_of_torchrun_fails(tmp_path: Path) -> None:
    """The program that records names it."""
    (tmp_path / "torchrun").mkdir()
    outcome = torchrun("name=raise@2.1", cwd=tmp_path / "torchrun")
    assert outcome.code == 1
    assert outcome.row["reason"] == "rank 1: ValueError: the model is broken"
    assert "rank 1: error: ValueError: the model is broken" in outcome.err
    assert not list(tmp_path.glob("lowvram-rank*"))
