"""Which rank is to blame for the end of a point, and of what."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from lowvram.launch.client import Ending
from lowvram.launch.outcome import Circumstances, Outcome, RankReport, num_oom_kills, outcome_of
from lowvram.launch.stop import StopConditions
from lowvram.launch.supervisor import EXIT_NOT_FORKED
from lowvram.results.row import Status

OK = RankReport({"status": "ok"})
RAISED = RankReport({"status": "error", "reason": "ValueError: broken"})
CUT_OFF = RankReport({"status": "error", "reason": "RuntimeError: Connection closed by peer"}, is_of_a_peer=True)
STOPPED = RankReport({"status": "interrupted", "reason": "stopped in the set-up"})
EXIT_1 = 1 << 8


def conditions(is_stopped: bool = False, is_timed_out: bool = False) -> StopConditions:
    found = StopConditions(1000.0, lambda: int(is_stopped))
    found._began -= 2000.0 * is_timed_out
    return found


def ended(rank: int, status: int = EXIT_1, ended_by: str | None = None, is_stopped: bool = False) -> Ending:
    return {"rank": rank, "status": status, "ended_by": ended_by, "is_stopped": is_stopped}


def killed(rank: int, ended_by: str | None = None, is_stopped: bool = False) -> Ending:
    return ended(rank, signal.SIGKILL, ended_by, is_stopped)


@pytest.fixture
def judge(tmp_path: Path) -> Any:
    def judge(
        ends: list[Ending] | None,
        told: dict[int, RankReport],
        stop_conditions: StopConditions | None = None,
        vram: str | None = None,
    ) -> tuple[str, str | None]:
        around = Circumstances(tmp_path, stop_conditions or conditions(), num_oom_kills(), vram)
        end: Outcome = outcome_of(ends, told, around, 45.0)
        return end.status.value, end.reason

    return judge


def test_a_kernel_that_counts_no_ends_is_none_that_ended_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", fail)
    assert num_oom_kills() == 0


def test_one_rank_is_not_named(judge: Any) -> None:
    assert judge([ended(0)], {0: RAISED}) == ("error", "ValueError: broken")
    assert judge([killed(0)], {}) == ("killed", "the process died of SIGKILL")
    assert judge([ended(0, 0)], {0: OK}) == ("ok", None)


def test_a_cap_may_be_why_native_code_has_crashed(judge: Any) -> None:
    crashed = [ended(0, signal.SIGSEGV)]
    assert judge(crashed, {}) == ("error", "the process died of SIGSEGV (see native.log)")
    hint = "; on a CPU native code may crash where vram=12MiB gives it no memory"
    assert judge(crashed, {}, vram="12MiB")[1] == f"the process died of SIGSEGV (see native.log){hint}"


def test_native_code_that_got_no_thread_met_a_limit_unless_memory_is_capped(judge: Any, tmp_path: Path) -> None:
    (tmp_path / "native.log").write_text("libgomp: Thread creation failed: Resource temporarily unavailable\n")
    status, reason = judge([ended(0)], {})
    assert (status, reason[:45]) == ("error", "no further process or thread may be started (")
    assert judge([ended(0)], {}, vram="12MiB") == ("oom", "out of memory in native code (see native.log)")
    (tmp_path / "native.log").write_text("recv: Resource temporarily unavailable\n")  # of a socket
    assert judge([ended(0, signal.SIGABRT)], {}, vram="12MiB")[1].startswith("the process died of SIGABRT")
    (tmp_path / "native.log").unlink()
    assert judge([ended(0, EXIT_NOT_FORKED << 8)], {})[0] == "error"


def test_whatever_fails_after_its_time_is_late_unless_somebody_stopped_it(judge: Any) -> None:
    late = ("timeout", "still running after timeout_s=1000")
    assert judge([ended(0)], {0: RAISED}, conditions(is_timed_out=True)) == late
    assert judge([killed(0)], {}, conditions(is_timed_out=True)) == late
    assert judge([ended(0, 0)], {0: OK}, conditions(is_timed_out=True)) == ("ok", None)
    both = conditions(is_timed_out=True, is_stopped=True)  # its snapshot took longer than was left
    assert judge([ended(0)], {0: STOPPED}, both) == ("interrupted", "stopped in the set-up")


def test_all_is_well_only_if_it_is_on_every_rank(judge: Any) -> None:
    both = [ended(1, 0), ended(0, 0)]
    assert judge(both, {0: OK, 1: OK}) == ("ok", None)
    assert judge([ended(0, 0), ended(1)], {0: OK, 1: RAISED}) == ("error", "rank 1: ValueError: broken")


def test_the_first_that_failed_by_itself_is_named(judge: Any) -> None:
    """In whatever order the ends are seen, and however the others had to be ended."""
    assert judge([ended(1), ended(0)], {0: CUT_OFF, 1: RAISED})[1] == "rank 1: ValueError: broken"
    assert judge([ended(0), ended(1, ended_by="term")], {0: CUT_OFF, 1: RAISED})[1] == "rank 1: ValueError: broken"
    assert judge([killed(1), killed(0, "kill")], {})[1] == "rank 1: the process died of SIGKILL"
    assert judge([killed(1), ended(0, ended_by="term")], {0: STOPPED})[1] == "rank 1: the process died of SIGKILL"
    assert judge([ended(0), killed(1, "term")], {0: CUT_OFF})[1] == "rank 1: the process died of SIGKILL"


def test_a_hang_is_blamed_on_the_rank_that_had_to_be_killed(judge: Any) -> None:
    status, reason = judge([ended(0), ended(2, ended_by="term"), killed(1, "kill")], {0: CUT_OFF, 2: CUT_OFF})
    assert status == "killed"
    assert reason.startswith("rank 1: the others waited for it longer than sharding.timeout_s=45")


def test_of_two_that_had_to_be_killed_the_one_that_stood_still_is_blamed(judge: Any) -> None:
    _, reason = judge([ended(0), killed(1, "kill"), killed(2, "kill", is_stopped=True)], {0: CUT_OFF})
    assert reason.startswith("rank 2: ")
    assert "was suspended (SIGSTOP)" in reason


def test_a_rank_that_hung_and_could_still_be_interrupted(judge: Any) -> None:
    status, reason = judge([ended(0), ended(1, ended_by="term")], {0: CUT_OFF, 1: STOPPED})
    assert (status, reason[:18]) == ("killed", "rank 1: the others")


def test_a_rank_that_nobody_here_sees(judge: Any) -> None:
    """Another program of torchrun's."""
    reason = "another rank has ended or hangs (RuntimeError: Connection closed by peer)"
    assert judge([ended(0)], {0: CUT_OFF}) == ("error", reason)


def test_a_rank_that_never_ends_after_the_others_did(judge: Any) -> None:
    status, reason = judge([ended(0, 0), killed(1, "kill")], {0: OK})
    assert (status, reason[:18]) == ("killed", "rank 1: the others")


def test_what_several_say_is_said_of_the_point(judge: Any) -> None:
    same = RankReport({"status": "nonfinite", "reason": "the loss of step 2 is nan"})
    assert judge([ended(1), ended(0)], {0: same, 1: same})[1] == "the loss of step 2 is nan"


@pytest.mark.parametrize("status", ["incompatible", "interrupted"])
def test_a_refusal_and_a_stop_are_of_the_point(judge: Any, status: str) -> None:
    told = RankReport({"status": status, "reason": "because"})
    assert judge([ended(1), ended(0, ended_by="term")], {0: STOPPED, 1: told}) == (status, "because")


def test_a_watchdog_that_ends_a_rank_tells_of_another(judge: Any, tmp_path: Path) -> None:
    """NCCL's ends the process itself, silently but for its log."""
    (tmp_path / "native.log").write_text("[rank0]: Watchdog caught collective operation timeout: WorkNCCL(...)")
    aborted = ended(0, signal.SIGABRT)
    assert judge([aborted, killed(1, "kill")], {})[1].startswith("rank 1: the others waited")
    assert judge([aborted, ended(1)], {1: RAISED})[1] == "rank 1: ValueError: broken"


@pytest.mark.parametrize("text", ["what():  std::bad_alloc", "memory allocation of 1048576 bytes failed"])
def test_native_logs_are_those_of_the_rank(judge: Any, tmp_path: Path, text: str) -> None:
    (tmp_path / "native.2.log").write_text(text)
    status, reason = judge([ended(2, signal.SIGABRT), ended(0)], {0: CUT_OFF})
    assert (status, reason) == ("oom", "rank 2: out of memory in native code (see native.2.log)")


@pytest.mark.parametrize(
    ("text", "by", "status"),
    [
        ("ffmpeg: mmap failed: Cannot allocate memory, using read()", None, "error"),
        ("x: caught MemoryError, retrying\nFatal Python error: Segmentation fault", signal.SIGSEGV, "error"),
        ("MemoryError\nFatal Python error: Segmentation fault", signal.SIGSEGV, "error"),
        ("Traceback (most recent call last):\n  File ...\nMemoryError", None, "oom"),
        ("fork: Cannot allocate memory\n", None, "oom"),
    ],
)
def test_who_goes_on_without_memory_did_not_end_for_it(
    judge: Any, tmp_path: Path, text: str, by: signal.Signals | None, status: str
) -> None:
    (tmp_path / "native.log").write_text(text)
    end = ended(0, by) if by else ended(0) | {"status": 7 << 8}
    assert judge([end], {})[0] == status


def test_what_was_ordered_explains_a_silent_end(judge: Any) -> None:
    both = [killed(0), killed(1)]
    assert judge(both, {}, conditions(is_stopped=True)) == ("interrupted", "stopped before it could save")
    assert judge(both, {}, conditions(is_timed_out=True)) == ("timeout", "still running after timeout_s=1000")


def test_the_fork_server_may_die_itself(judge: Any) -> None:
    assert judge(None, {}) == (Status.KILLED, "the process that starts points has died")
    assert judge(None, {0: RAISED})[1] == "ValueError: broken"
