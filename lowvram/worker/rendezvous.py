"""How the ranks of a point find each other before anything is built, and how they end together.

The fork server and torchrun set the same environment variables, which say where. `Rendezvous.join` then initializes
torch.distributed (gloo on the CPU, NCCL on CUDA). A point with one rank needs none of this.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from lowvram.config.errors import BadInput, Incompatible
from lowvram.config.settings import CHILDS_OWN, PARENT_ONLY
from lowvram.launch.spec import PointSpec
from lowvram.launch.supervisor import HERE
from lowvram.launch.torchrun import Launch

T = TypeVar("T")
THREADS = "OMP_NUM_THREADS"
SLOW_S = 1.0  # by which an answer may be late
CAUSE_S = 1.0  # how long a rank that has failed asks which one failed first: a store answers at once, or is lost
LOOK_S = 0.005  # how often a waiting rank polls the store; it sleeps in between, so that signals get through


def shared(store: Store, spec: PointSpec, rank: int) -> PointSpec:
    """The first rank's folder and run, for ranks that are programs of their own.

    Raises:
        Incompatible: they were started with different configurations.
    """
    config = {key: value for key, value in spec.config.items() if key in CHILDS_OWN and key not in PARENT_ONLY}
    if rank == 0:
        store.set("spec", json.dumps([config, str(spec.folder), spec.is_resumed, spec.run]))
    first, folder, is_resumed, run = json.loads(store.get("spec"))
    if first != config:
        raise Incompatible(f"rank {rank} was started with another configuration than rank 0")
    return replace(spec, folder=Path(folder), is_resumed=is_resumed, run=run)


class PeerLost(RuntimeError):
    """Another rank did not arrive in time."""


def within(timeout_s: float, ask: Callable[[], T]) -> T:
    """The answer of something that asks the store. A thread of its own waits for it: a store that is lost together with
    its machine never answers, whatever time limit it was given.

    Raises:
        PeerLost: no answer came, though `ask` should have given up after `timeout_s`.
    """
    answer = Future[T]()

    def wait() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:  # passed on, whatever it is
            answer.set_exception(error)

    threading.Thread(target=wait, daemon=True).start()
    try:
        return answer.result(timeout_s + SLOW_S)
    except TimeoutError:
        raise PeerLost(f"waited {timeout_s:g} s for the machine of rank 0") from None


class WrongStart(BadInput):
    """Another number of processes was started than the point has ranks: another start may do."""


@final
class Rendezvous:
    """This process among the ranks of its point.

    Args:
        listener: the descriptor at which the first rank hosts the store where they meet; not used by the others.
        is_unwatched: whether each rank belongs to another program, as under torchrun: nobody here sees how they end.
    """

    def __init__(self, launch: Launch, listener: int | None = None, is_unwatched: bool = False) -> None:
        self._launch, self._listener, self.is_unwatched = launch, listener, is_unwatched
        self._store: Store | None = None
        self._num_ranks, self._timeout_s = 1, 0.0

    @property
    def rank(self) -> int:
        return self._launch.rank

    def count(self, ranks: str, wanted: int, num_devices: int | None = None) -> tuple[int, int]:
        """How many ranks the point has, and how many of them are on this machine.

        Args:
            ranks: what the user gave for sharding.ranks.
            wanted: how many ranks it asks for, on a single machine.
            num_devices: what the user gave for `devices`, if anything.

        Raises:
            WrongStart: torchrun has started another number.
        """
        if not self.is_unwatched:
            return wanted, wanted
        num_ranks = self._launch.num_ranks
        allowed = f"{num_ranks}, the number of ranks that torchrun has started"
        if ranks != "auto" and int(ranks) != num_ranks:
            raise WrongStart("sharding.ranks", ranks, f"auto or {allowed}")
        if num_devices not in (None, num_ranks):
            raise WrongStart("devices", num_devices, f"null or {allowed}")
        return num_ranks, self._launch.num_local_ranks

    def num_threads(self) -> int:
        """How many threads this rank may have: its share of OMP_NUM_THREADS, or else of the cores. torchrun sets that
        variable to 1 unless the user has, so there it says nothing."""
        given = "" if self.is_unwatched else os.environ.get(THREADS, "").partition(",")[0].strip()
        most = int(given) if given.isdecimal() else 0
        return max(1, (most or len(os.sched_getaffinity(0))) // self._launch.num_local_ranks)

    def join(
        self, spec: PointSpec, num_ranks: int, device: torch.device, timeout_s: float
    ) -> tuple[torch.device, PointSpec]:
        """Wait for the other ranks and initialize torch.distributed; returns the device of this rank, and the
        specification of all.

        Raises:
            WrongStart: another number of ranks was started.
            PeerLost: another rank did not come within `timeout_s`.
            Incompatible: under torchrun, ranks were started with different configurations.
        """
        started = self._launch.num_ranks
        allowed = f"{started}, the number of processes that were started for it: start as many, as with torchrun"
        if num_ranks != started:
            raise WrongStart("sharding.ranks", str(num_ranks), allowed)
        torch.set_num_threads(self.num_threads())
        if num_ranks == 1:
            return device, spec
        self._num_ranks, self._timeout_s = num_ranks, timeout_s
        backend = "gloo"
        if device.type == "cuda":
            device, backend = torch.device("cuda", self._launch.local_rank), "cpu:gloo,cuda:nccl"
            torch.cuda.set_device(device)
        timeout = timedelta(seconds=timeout_s)
        self._store = PrefixStore("lowvram", self._opened_store(timeout))
        self._store.set_timeout(timeout)
        within(timeout_s, lambda: self._gather("here"))
        spec = shared(self._store, spec, self.rank) if self.is_unwatched else spec
        dist.init_process_group(backend, store=self._store, rank=self.rank, world_size=num_ranks, timeout=timeout)
        return device, spec

    def leave(self, fields: dict[str, Any], on_fields: Callable[[int, dict[str, Any]], object]) -> None:
        """Wait until all ranks are done: one that ends earlier would close connections that others still read.

        Args:
            fields: of this rank's row.
            on_fields: called on rank 0 with each other rank's number and fields.
        """
        if self._store is None:
            return
        about = {"status": "ok", "memory": fields.get("memory", {})}
        for rank, told in within(2 * self._timeout_s, lambda: self._ends_told(about)).items():
            on_fields(rank, told)

    def _ends_told(self, about: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """On rank 0 what each other rank tells of its end, once all have ended; elsewhere empty."""
        assert self._store is not None
        self._store.set(f"fields {self.rank}", json.dumps(about))
        self._gather("done")
        if self.rank:
            self._store.set(f"gone {self.rank}", "")
            return {}
        told = {rank: json.loads(self._store.get(f"fields {rank}")) for rank in range(1, self._num_ranks)}
        self._gather("gone")  # rank 0 may host the store, so it ends last
        return told

    def cause_elsewhere(self, fields: dict[str, Any], is_of_a_peer: bool) -> dict[str, Any]:
        """Under torchrun, where no parent sees all ranks: for a rank that failed because of another one, status and
        reason of that one; else empty.

        Args:
            fields: status and reason of this rank.
        """
        if self._store is None or not self.is_unwatched:
            return {}
        failure = {"status": fields["status"], "reason": f"rank {self.rank}: {fields['reason']}"}
        with suppress(dist.DistError, PeerLost):  # the store is gone too
            return within(CAUSE_S, lambda: self._cause_told(None if is_of_a_peer else failure))
        return {}

    def _cause_told(self, failure: dict[str, Any] | None) -> dict[str, Any]:
        """Tell the others how this rank has failed; or, with None, what another rank has told, or empty."""
        assert self._store is not None
        if failure is not None:
            self._store.set("failed", json.dumps(failure))
        elif self._store.check(["failed"]):
            return json.loads(self._store.get("failed"))
        return {}

    def _opened_store(self, timeout: timedelta) -> Store:
        if self.is_unwatched:
            return next(rendezvous("env://", self.rank, self._launch.num_ranks, timeout=timeout))[0]
        listener = self._listener if self.rank == 0 else None
        port, is_master = int(os.environ["MASTER_PORT"]), listener is not None
        return TCPStore(
            HERE, port, is_master=is_master, wait_for_workers=False, timeout=timeout, master_listen_fd=listener
        )

    def _gather(self, word: str) -> None:
        """Wait until all ranks have called this with the same word."""
        assert self._store is not None
        self._store.set(f"{word} {self.rank}", "")
        missing, deadline = list(range(self._num_ranks)), time.monotonic() + self._timeout_s
        while missing := [rank for rank in missing if not self._store.check([f"{word} {rank}"])]:
            if time.monotonic() > deadline:
                raise PeerLost(f"waited sharding.timeout_s={self._timeout_s:g} for rank {missing[0]}")
            time.sleep(LOOK_S)
