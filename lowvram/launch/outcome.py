"""How a point ended, from how each of its ranks ended: which rank caused a failure, and why. Imports no torch.

A rank that ended without a report, by a signal or in native code, is judged by its exit status. Of several ranks the
first one that failed by itself is to blame; others fail because they wait for it. If none failed by itself, one hung:
the one that had to be killed.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lowvram.config import thread_limits
from lowvram.launch.client import Ending
from lowvram.launch.native_log import native_log
from lowvram.launch.stop import StopConditions
from lowvram.launch.supervisor import EXIT_NOT_FORKED
from lowvram.results.row import Status

# What ends a line where C++, the system, Python or Rust ends a process that gets no memory. A survivor reports more.
NO_MEMORY = re.compile(
    r"(std::bad_alloc|Cannot allocate memory|MemoryError|memory allocation of \d+ bytes failed)\W*$", re.MULTILINE
)
PEER_WORDS = ("/gloo/", "Watchdog caught collective operation timeout", "ncclRemoteError")  # in a native log


@dataclass(frozen=True)
class RankReport:
    """A rank's own report of its end."""

    fields: dict[str, Any]
    is_of_a_peer: bool = False  # it failed because another rank had ended or hung
    trace: str = ""


@dataclass(frozen=True)
class Outcome:
    """The end of one rank, or of the point."""

    rank: int
    status: Status
    reason: str | None
    is_of_a_peer: bool = False  # it failed because another rank had ended or hung
    is_forced: bool = False  # after another rank had ended, we had to kill it
    is_asked: bool = False  # after another rank had ended, it ended because we asked it to
    is_stopped: bool = False  # when it was killed, it was stopped, as after Ctrl-Z


@dataclass(frozen=True)
class Circumstances:
    """What else is known of a point that has ended."""

    folder: Path
    stop_conditions: StopConditions
    num_oom_kills_before: int
    vram: str | None = None  # as it was typed


def outcome_of(
    ended: Sequence[Ending] | None, reports: Mapping[int, RankReport], around: Circumstances, timeout_s: float
) -> Outcome:
    """How the point ended.

    Args:
        ended: how its processes ended, in the order of their ends; None if the fork server itself has died.
        reports: by rank; ranks that ended without a report are missing.
        timeout_s: how long a rank waits for another one, for messages.
    """
    end = of_ranks(ended, reports, around, timeout_s)
    is_late = (
        around.stop_conditions.is_timed_out and not around.stop_conditions.is_stopped and end.status is not Status.OK
    )
    return replace(end, status=Status.TIMEOUT, reason=around.stop_conditions.how_late) if is_late else end


def of_ranks(
    ended: Sequence[Ending] | None, reports: Mapping[int, RankReport], around: Circumstances, timeout_s: float
) -> Outcome:
    """How the point ended, without regard to its time limit."""
    if ended is None:
        return outcome_from(*min(reports.items())) if reports else Outcome(0, *how_all_died(around.stop_conditions))
    ranks = [outcome_of_rank(ending, reports.get(ending["rank"]), around) for ending in ended]
    failed = [rank for rank in ranks if rank.status is not Status.OK]
    if not failed:
        return min(ranks, key=lambda rank: rank.rank)
    blamed = to_blame(failed, timeout_s)
    if len(reports.keys() | {rank.rank for rank in ranks}) == 1 or is_of_all(blamed, ranks):
        return blamed
    return replace(blamed, reason=f"rank {blamed.rank}: {blamed.reason}")


def to_blame(failed: Sequence[Outcome], timeout_s: float) -> Outcome:
    """The rank that caused the failure. `failed` is in the order of their ends."""
    own = [rank for rank in failed if not (rank.is_of_a_peer or rank.is_forced or rank.is_asked)]
    if own:
        return own[0]
    hung = [rank for rank in failed if rank.is_forced] or [rank for rank in failed if not rank.is_of_a_peer]
    if not hung:  # the rank to blame belongs to another program that torchrun has started
        return replace(failed[0], reason=f"another rank has ended or hangs ({failed[0].reason})")
    blamed = min(hung, key=lambda rank: (not rank.is_stopped, rank.rank))
    how = "it was suspended (SIGSTOP)" if blamed.is_stopped else "it did not answer"
    return replace(
        blamed,
        status=Status.KILLED,
        reason=f"the others waited for it longer than sharding.timeout_s={timeout_s:g}: {how}, and was ended",
    )


def is_of_all(blamed: Outcome, ranks: Sequence[Outcome]) -> bool:
    """Whether the reason holds for the whole point: a refusal, a stop, or the same reason as another rank's."""
    if blamed.status in (Status.INCOMPATIBLE, Status.INTERRUPTED, Status.TIMEOUT):
        return True
    return [rank.reason for rank in ranks if not rank.is_forced].count(blamed.reason) > 1


def outcome_of_rank(ending: Ending, report: RankReport | None, around: Circumstances) -> Outcome:
    """How one rank ended: by its own report, else by its exit status."""
    rank, by = ending["rank"], ending["ended_by"]
    if report is not None:
        outcome = outcome_from(rank, report)
        return replace(outcome, is_asked=by is not None and outcome.status is Status.INTERRUPTED)
    is_killed = os.WIFSIGNALED(ending["status"]) and os.WTERMSIG(ending["status"]) == signal.SIGKILL
    log = text_of(around.folder / native_log(rank))
    return Outcome(
        rank,
        *exit_reason(rank, ending["status"], log, around),
        is_of_a_peer=any(word in log for word in PEER_WORDS),
        is_forced=by == "kill" and is_killed,
        is_stopped=ending["is_stopped"],
    )


def outcome_from(rank: int, report: RankReport) -> Outcome:
    return Outcome(rank, Status(report.fields["status"]), report.fields.get("reason"), report.is_of_a_peer)


def exit_reason(rank: int, status: int, log: str, around: Circumstances) -> tuple[Status, str]:
    """Status and reason of a rank that ended without a report."""
    if around.stop_conditions.is_stopped or around.stop_conditions.is_timed_out:
        return how_all_died(around.stop_conditions)
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    if number == signal.SIGKILL and num_oom_kills() > around.num_oom_kills_before:
        return Status.OOM, "the kernel ended it because the machine had no memory left"
    if number in (signal.SIGKILL, signal.SIGTERM):
        return Status.KILLED, f"the process died of {signal.Signals(number).name}"
    has_no_threads = thread_limits.says_so(log) or os.waitstatus_to_exitcode(status) == EXIT_NOT_FORKED
    is_out_of_memory = number != signal.SIGSEGV and NO_MEMORY.search(log)
    if is_out_of_memory or (has_no_threads and around.vram):
        return Status.OOM, f"out of memory in native code (see {native_log(rank)})"
    if has_no_threads:
        return Status.ERROR, f"{thread_limits.limits()} (see {native_log(rank)})"
    if number is None:
        return Status.ERROR, f"the process ended by itself with exit code {os.WEXITSTATUS(status)}"
    hint = f"; on a CPU native code may crash where vram={around.vram} gives it no memory" if around.vram else ""
    return Status.ERROR, f"the process died of {signal.Signals(number).name} (see {native_log(rank)}){hint}"


def how_all_died(stop_conditions: StopConditions) -> tuple[Status, str]:
    """Status and reason of a point that was stopped, or whose fork server has died."""
    if stop_conditions.is_stopped:
        return Status.INTERRUPTED, stop_conditions.how_stopped
    if stop_conditions.is_timed_out:
        return Status.TIMEOUT, stop_conditions.how_late
    return Status.KILLED, "the process that starts points has died"


def text_of(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def num_oom_kills() -> int:
    """How many processes the kernel's OOM killer has ended since the machine started; 0 where it doesn't say."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
