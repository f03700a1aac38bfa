"""How the ranks of a point meet, and how they part: inside each child, before anything is built and after all is done.

From the meeting on `torch.distributed` knows them (gloo on the CPU, NCCL on CUDA). A point with one rank meets nobody.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store  # the public names have no types

from lowvram.config.errors import BadInput
from lowvram.loops.setup import Sharding
from lowvram.worker.rendezvous import Request, Way

LOOK_S = 0.005  # how often a rank that waits looks for the others; between two looks it hears signals


class PeerLost(RuntimeError):
    """Another rank didn't come."""


@final
class Meeting:
    """One process among the ranks of its point."""

    def __init__(self, way: Way, request: Request) -> None:
        self._way, self._request = way, request
        self._store: Store | None = None
        self._num_ranks, self._timeout_s = 1, 0.0

    @property
    def rank(self) -> int:
        return self._way.rank

    def count(self, sharding: Sharding, device: torch.device, names_card: bool) -> int:
        """How many ranks the point has, by `sharding.ranks` and the devices.

        Args:
            names_card: whether the user typed which card, such as device=cuda:1.

        Raises:
            BadInput: more than there are CUDA devices, or not what torchrun has started.
        """
        num_ranks = self._way.count(sharding, device, names_card)
        if num_ranks == 1 or device.type != "cuda":
            return num_ranks
        num_local, num_devices = self._way.num_local(num_ranks), torch.cuda.device_count()
        if num_local > num_devices:
            allowed = f"at most {num_devices}, the number of visible CUDA devices: each rank takes one"
            raise BadInput("sharding.ranks", str(num_local), allowed)
        if names_card:
            allowed = "auto or cuda with several ranks: they take the visible devices in turn (CUDA_VISIBLE_DEVICES)"
            raise BadInput("device", str(device), allowed)
        return num_ranks

    def join(self, num_ranks: int, device: torch.device, timeout_s: float) -> torch.device:
        """Meet the others; returns the rank's own device.

        Raises:
            PeerLost: one of them did not come within `timeout_s`.
        """
        torch.set_num_threads(max(1, self._request["threads"] // self._way.num_local(num_ranks)))
        if num_ranks == 1:
            return device
        self._num_ranks, self._timeout_s = num_ranks, timeout_s
        backend = "gloo"
        if device.type == "cuda":
            device, backend = torch.device("cuda", self._way.local_rank), "cpu:gloo,cuda:nccl"
            torch.cuda.set_device(device)
        timeout = timedelta(seconds=timeout_s)
        self._store = PrefixStore("lowvram", self._way.open_store(num_ranks, timeout_s))
        self._store.set_timeout(timeout)
        self._gather("here")
        self._way.share(self._store, self._request)
        dist.init_process_group(backend, store=self._store, rank=self.rank, world_size=num_ranks, timeout=timeout)
        return device

    def part(self, fields: dict[str, Any], tell: Callable[[int, dict[str, Any]], None]) -> None:
        """Wait until all have done their work: whoever leaves earlier tears what another still receives.

        Args:
            fields: what this rank says in its row.
            tell: called with the fields of the ranks whom nobody else hears.
        """
        if self._store is None:
            return
        self._store.set(f"fields {self.rank}", json.dumps({"status": "ok", "memory": fields.get("memory", {})}))
        self._gather("done")
        for rank in range(1, self._num_ranks) if self._way.is_unwatched and self.rank == 0 else ():
            tell(rank, json.loads(self._store.get(f"fields {rank}")))
        if self.rank == 0:  # it may hold the store
            self._gather("gone")
        else:
            self._store.set(f"gone {self.rank}", "")

    def cause_elsewhere(self, fields: dict[str, Any], is_of_a_peer: bool) -> dict[str, Any]:
        """Of a rank that has failed: the end of the one that is the cause, where nobody else can tell them apart."""
        if self._store is None or not self._way.is_unwatched:
            return {}
        with suppress(dist.DistError):  # the store is gone too
            if not is_of_a_peer:
                told = {"status": fields["status"], "reason": f"rank {self.rank}: {fields['reason']}"}
                self._store.set("failed", json.dumps(told))
            elif self._store.check(["failed"]):
                return json.loads(self._store.get("failed"))
        return {}

    def _gather(self, word: str) -> None:
        """Wait for all."""
        assert self._store is not None
        self._store.set(f"{word} {self.rank}", "")
        missing, deadline = list(range(self._num_ranks)), time.monotonic() + self._timeout_s
        while missing := [rank for rank in missing if not self._store.check([f"{word} {rank}"])]:
            if time.monotonic() > deadline:
                raise PeerLost(f"waited sharding.timeout_s={self._timeout_s:g} for rank {missing[0]}")
            time.sleep(LOOK_S)
