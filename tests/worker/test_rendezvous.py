"""How many ranks a point has, and which devices they get; what torchrun says. Rendezvous itself: test_ranks.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from lowvram.config.errors import BadInput
from lowvram.knobs.sharding import DDP, Unsharded
from lowvram.launch.native_log import native_log
from lowvram.launch.spec import PointSpec
from lowvram.launch.torchrun import AGENT, Launch, aside, is_ended_with_first, launch_from
from lowvram.loops.setup import Sharding, check_cards, wanted_ranks
from lowvram.worker.rendezvous import Rendezvous, WrongStart
from tests.laboratory import CPU

CUDA = torch.device("cuda", 0)
LAUNCH = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node", "MASTER_PORT": "1"}


@pytest.fixture(autouse=True)
def two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def first(num_ranks: int) -> Rendezvous:
    return Rendezvous(Launch(0, num_ranks, 0, num_ranks))


def started(launch: Launch) -> Rendezvous:
    return Rendezvous(launch, is_unwatched=True)


def count(meeting: Rendezvous, sharding: Sharding, device: torch.device, names_card: bool) -> int:
    wanted = wanted_ranks(sharding, device, names_card)
    num_ranks, num_local = meeting.count(sharding.ranks, wanted)
    check_cards(num_local, device, names_card)
    return num_ranks


@pytest.mark.parametrize(
    ("sharding", "device", "names_card", "num_ranks"),
    [
        (Unsharded(), CUDA, False, 1),
        (DDP(), CUDA, False, 2),
        (DDP(), torch.device("cuda", 1), True, 1),
        (DDP(), CPU, False, 1),
        (DDP(ranks="3"), CPU, False, 3),
        (Unsharded(ranks="2"), CPU, False, 2),
        (DDP(ranks="1"), CUDA, False, 1),
    ],
)
def test_auto_is_every_visible_card(
    sharding: Unsharded, device: torch.device, names_card: bool, num_ranks: int
) -> None:
    assert count(first(num_ranks), sharding, device, names_card) == num_ranks


def test_more_ranks_than_cards_are_refused_with_both_numbers() -> None:
    with pytest.raises(BadInput, match=r"sharding.ranks='3': must be at most 2, the number of visible CUDA devices"):
        count(first(1), DDP(ranks="3"), CUDA, names_card=False)


def test_devices_are_as_many_as_torchrun_has_started() -> None:
    launch = Launch(0, 2, 0, 2)
    for num_devices in (None, 2):
        assert started(launch).count("auto", 2, num_devices) == (2, 2)
    for ranks in ("auto", "2"):
        with pytest.raises(WrongStart, match="devices=4: must be null or 2, the number of ranks that torchrun has"):
            started(launch).count(ranks, 4, 4)
    assert first(4).count("auto", 4, 4) == (4, 4)


@pytest.mark.parametrize(
    ("given", "num_ranks", "num_threads"),
    [("", 1, 8), ("3", 1, 3), ("6,2", 2, 3), ("1", 4, 1), ("0", 2, 4), ("", 4, 2)],
)
def test_ranks_share_the_threads_that_the_program_may_have(
    monkeypatch: pytest.MonkeyPatch, given: str, num_ranks: int, num_threads: int
) -> None:
    """So that points side by side (jobs=2) don't each take all cores. torchrun sets the variable to 1 by itself."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert first(num_ranks).num_threads() == num_threads
    assert started(Launch(0, num_ranks, 0, num_ranks)).num_threads() == 8 // num_ranks


def test_several_ranks_take_no_card_of_the_user_s_choice() -> None:
    with pytest.raises(BadInput, match="device='cuda:1': must be auto or cuda with several ranks"):
        count(first(1), DDP(ranks="2"), torch.device("cuda", 1), names_card=True)


def test_a_rank_runs_only_with_as_many_others_as_the_point_takes() -> None:
    with pytest.raises(BadInput, match=r"sharding.ranks='2': must be 1, the number of processes that were started"):
        first(1).join(PointSpec("0" * 16, "n", 0, Path(), {}, {}), 2, CPU, 1.0)


def test_torchrun_s_words_are_understood() -> None:
    assert launch_from({**LAUNCH, "LOCAL_WORLD_SIZE": "2"}) == Launch(3, 4, 1, 2)
    assert launch_from(LAUNCH) == Launch(3, 4, 1, 4)
    assert launch_from({name: value for name, value in LAUNCH.items() if name != "LOCAL_RANK"}) is None


@pytest.mark.parametrize(("rank", "local_rank"), [(1, 1), (2, 0), (3, 1)])
@pytest.mark.parametrize("environment", [{AGENT: "none"}, {}])
def test_a_rank_that_fails_waits_for_rank_0_where_its_own_end_may_end_rank_0(
    rank: int, local_rank: int, environment: dict[str, str]
) -> None:
    """Two machines with two ranks each: an agent of torchrun ends its own machine's, srun ends all."""
    is_beside_rank_0 = rank < 2
    assert is_ended_with_first(Launch(rank, 4, local_rank, 2), environment) == (is_beside_rank_0 or not environment)


def test_torchrun_on_two_machines_is_held_to_the_cards_of_each() -> None:
    assert count(started(Launch(3, 4, 1, 2)), DDP(ranks="4"), CUDA, names_card=False) == 4
    with pytest.raises(BadInput, match=r"sharding.ranks='3': must be at most 2"):
        count(started(Launch(3, 6, 1, 3)), DDP(), CUDA, names_card=False)


def test_a_program_aside_says_nothing_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with aside(Launch(1, 2, 1, 2)) as folder:
        assert folder is not None
        (folder / native_log(1)).touch()
        print("said")
        print("said", file=sys.stderr)
    assert capsys.readouterr() == ("", "")
    assert not folder.exists()


@pytest.mark.parametrize("launch", [None, Launch(0, 2, 0, 2)])
def test_one_program_speaks(launch: Launch | None, capsys: pytest.CaptureFixture[str]) -> None:
    with aside(launch) as folder:
        assert folder is None
        print("said")
    assert capsys.readouterr().out == "said\n"


def test_native_logs_have_names_of_their_own() -> None:
    assert [native_log(rank) for rank in range(3)] == ["native.log", "native.1.log", "native.2.log"]
    assert len({Path(native_log(rank)).stem for rank in range(3)}) == 3
