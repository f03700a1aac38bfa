"""Threads that get no memory to begin with."""

from __future__ import annotations

import subprocess
import sys
from threading import Thread

import pytest

from lowvram.compat.threads import start_or_fail, started_event
from tests.compat.sentences import needed

BY = "a program under ulimit -d, which would wait for ever"


class Dead(Thread):
    """Ends before it begins, as where its first frame gets no memory."""

    def _bootstrap(self) -> None:
        return


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Thread, "start", Thread.start)


@needed("threading.Thread._started", BY)
def test_a_thread_that_ends_before_it_begins_is_not_waited_for() -> None:
    start_or_fail()
    with pytest.raises(MemoryError, match="a thread has got no memory to begin with"):
        Dead(daemon=True).start()


@needed("threading.Thread._started", BY)
def test_other_threads_begin_as_ever() -> None:
    start_or_fail()
    assert not started_event(Thread()).is_set()
    found: list[int] = []
    threads = [Thread(target=found.append, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [*range(8)]


@pytest.mark.medium
def test_pythons_own_would_wait_for_ever() -> None:
    """Once this fails, compat/threads.py can go."""
    code = "from tests.compat.test_threads import Dead; print('begun', flush=True); Dead(daemon=True).start()"
    with pytest.raises(subprocess.TimeoutExpired) as waited:
        subprocess.run([sys.executable, "-c", code], timeout=8, check=False, stdout=subprocess.PIPE)
    assert waited.value.stdout == b"begun\n"
