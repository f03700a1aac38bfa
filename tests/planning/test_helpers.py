"""Helpers: what they answer is what this process would, whatever happens to them."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lowvram.config.errors import BadInput, Incompatible
from lowvram.config.registry import knob_of, ready_options
from lowvram.config.settings import KNOB_GROUPS
from lowvram.planning import helpers
from lowvram.planning.devices import load_device
from lowvram.planning.estimate import PlanDevice
from lowvram.planning.helpers import Helpers, num_helpers
from lowvram.planning.trace.fake import CantPlan
from lowvram.planning.worker import CANT_BE_HAD, PlanJob, Planner
from lowvram.search.plan_cache import PlanCache
from lowvram.search.worker import search
from tests.calls import TINY
from tests.planning.test_worker import composed

CARD = ("plan.device=rtx3060", "vram=2GiB")
PARENT = os.getpid()


class Question(NamedTuple):
    number: int
    kind: str = ""
    carried: Any = None


def tenfold(question: Question) -> tuple[int, int]:
    """Ten times the number, and who says so."""
    time.sleep(0.01)
    return 10 * question.number, os.getpid()


def answers_of(num: int, answer: Callable[[Any], Any], questions: list[Question]) -> dict[int, Any]:
    with Helpers(num, answer) as asked:
        return dict(asked.answers(questions))


@pytest.mark.parametrize("num", [0, 2])
def test_each_job_is_answered_once(num: int) -> None:
    found = answers_of(num, tenfold, [Question(number) for number in range(7)])
    assert {index: answer for index, (answer, _) in found.items()} == {index: 10 * index for index in range(7)}
    assert len({pid for _, pid in found.values()} - {os.getpid()}) == num


def test_a_helper_is_given_jobs_of_kinds_that_it_has_had() -> None:
    """Then those of kinds that none has had; others only if nothing else is left."""
    with Helpers(2, tenfold) as asked:
        one, other = asked.kinds
        asked.kinds |= {one: {"a"}, other: {"b"}}
        left: dict[int, Any] = {index: Question(index, kind) for index, kind in enumerate("bbacb")}
        assert asked.next(one, left) == 2
        assert asked.next(other, left) == 0
        del left[2]
        assert asked.next(one, left) == 3
        del left[3]
        assert asked.next(one, left) == 0


def test_what_a_lost_helper_was_asked_is_answered_here() -> None:
    """As one that the kernel has killed."""

    def dies(question: Question) -> int:
        if question.number == 1 and os.getpid() != PARENT:
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid()

    found = answers_of(2, dies, [Question(number) for number in range(6)])
    assert found[1] == os.getpid()
    assert len(found) == 6
    everywhere = answers_of(2, lambda _: os.getpid() if os.getpid() == PARENT else os._exit(1), [Question(0)] * 4)
    assert set(everywhere.values()) == {os.getpid()}


def test_what_cannot_be_sent_is_answered_here() -> None:
    found = answers_of(2, lambda question: (os.getpid(), question.carried), [Question(0, "", lambda: 1), Question(1)])
    assert found[0][0] == os.getpid() != found[1][0]
    unsendable = answers_of(2, lambda question: lambda: question.number, [Question(5)])
    assert unsendable[0]() == 5


def test_an_unexpected_error_is_raised_here() -> None:
    def fails(question: Question) -> int:
        raise KeyError(question.number)

    with pytest.raises(KeyError):
        answers_of(2, fails, [Question(3)])


def test_what_helpers_print_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    def says(question: Question) -> int:
        print("note: the same")
        return question.number

    answers_of(2, says, [Question(number) for number in range(5)])
    assert capsys.readouterr().out == "note: the same\n"


def test_no_helper_is_left() -> None:
    """Not even one whose answer nobody waits for."""

    def slow_but_first(question: Question) -> int:
        time.sleep(60 * question.number)
        return question.number

    with Helpers(2, slow_but_first) as asked:
        processes = [*asked.processes]
        assert next(asked.answers([Question(0), Question(1), Question(2)])) == (0, 0)
    assert not any(process.is_alive() for process in processes)


def test_helpers_end_with_a_process_that_is_killed() -> None:
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        asked = Helpers(2, tenfold)
        os.write(writing, " ".join(str(each.pid) for each in asked.processes).encode())
        os._exit(0)  # without any end of its own
    os.waitpid(pid, 0)
    pids = [int(each) for each in os.read(reading, 100).split()]
    assert len(pids) == 2
    ends = time.monotonic() + 20
    while any(is_running(each) for each in pids):
        assert time.monotonic() < ends, "helpers live on"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_one_job_or_core_needs_no_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(helpers.threading, "active_count", lambda: 1)
    monkeypatch.setattr(helpers, "free_host_bytes", lambda: 2**40)
    assert [num_helpers(num) for num in (1, 2, 3, 100)] == [0, 2, 3, 4]
    monkeypatch.setattr(helpers, "free_host_bytes", lambda: 2**31)
    assert num_helpers(100) == 2
    monkeypatch.setattr(helpers.sys, "platform", "darwin")
    assert num_helpers(100) == 0


def test_every_option_can_be_sent() -> None:
    for group in KNOB_GROUPS:
        for name in ready_options(group):
            knob = knob_of((group, name))
            assert repr(pickle.loads(pickle.dumps(knob))) == repr(knob)


def test_whole_jobs_and_mistakes_can_be_sent() -> None:
    settings, choices = composed(*TINY, *CARD)
    job = Planner().job(settings, choices, PlanDevice("rtx3060", load_device("rtx3060")))
    assert repr(again := pickle.loads(pickle.dumps(job))) == repr(job)
    assert isinstance(again, PlanJob)
    assert again.kind == job.kind
    for mistake in (BadInput("accum.parts", 3, "2"), CantPlan("so"), Incompatible("so")):
        assert type(mistake) in CANT_BE_HAD
        assert str(pickle.loads(pickle.dumps(mistake))) == str(mistake)


@pytest.mark.medium
def test_a_search_finds_the_same_with_helpers() -> None:
    found: list[Any] = []
    for num in (0, 2):
        settings, choices = composed(*TINY, *CARD, "train.batch_size=8", "search.groups=[ckpt,logits,precision]")
        planner, counts = Planner(), list[int]()
        device = PlanDevice("rtx3060", load_device("rtx3060"))
        with Helpers(num, planner.plan_or_error) as asked:
            cache = PlanCache(planner, settings, choices, device, counts.append, helpers=asked)
            found.append(search(cache, []))
        assert counts == [*range(1, len(counts) + 1)]
        assert len(counts) >= len(cache.plans) > 6
    assert found[0] == found[1]
