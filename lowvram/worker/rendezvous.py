"""How the ranks of a point find each other before anything is built, and how they end together.

How a rank finds the others depends on what started it (`Role`). `Rendezvous.join` then initializes torch.distributed
(gloo on the CPU, NCCL on CUDA). A point with one rank needs none of this.
"""

from __future__ import annotations

import json
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from lowvram.config.errors import BadInput, Incompatible
from lowvram.config.settings import PARENT_ONLY
from lowvram.launch.supervisor import RankPlace
from lowvram.launch.torchrun import Launch

HERE = "127.0.0.1"
LOOK_S = 0.005  # how often a waiting rank polls the store; it sleeps in between, so that signals get through
Request = dict[str, Any]


class Role(ABC):
    """How this process was started, and so how it finds the other ranks. The defaults are for ranks that our fork
    server has started on one machine."""

    rank: int
    local_rank: int  # among those of this machine

    @abstractmethod
    def count(self, ranks: str, wanted: int) -> int:
        """How many ranks the point has.

        Args:
            ranks: what the user gave for sharding.ranks.
            wanted: how many ranks it asks for, on a single machine.
        """

    def num_local(self, num_ranks: int) -> int:
        """How many of them are on this machine."""
        return num_ranks

    @abstractmethod
    def open_store(self, num_ranks: int, timeout_s: float) -> Store:
        """The key-value store through which the ranks find each other."""

    def share(self, store: Store, request: Request) -> None:  # noqa: B027 (most roles need nothing)
        """Make sure that all ranks have the same request, as those of the fork server have."""

    @property
    def is_unwatched(self) -> bool:
        """Whether other ranks are outside our fork server, so that it can't see how they end."""
        return False


@final
class Master(Role):
    """The first rank of a point: it hosts the store, and asks the fork server for the others."""

    def __init__(self, place: RankPlace) -> None:
        assert place.call is not None
        self.rank = self.local_rank = 0
        self._call, self._held = place.call, place.held

    def count(self, ranks: str, wanted: int) -> int:
        return wanted

    def open_store(self, num_ranks: int, timeout_s: float) -> Store:
        listener = socket.socket()  # reachable only from this machine, at any free port
        listener.bind((HERE, 0))
        listener.listen()
        port = listener.getsockname()[1]
        message = json.dumps({"num_ranks": num_ranks, "timeout_s": timeout_s, "port": port})
        socket.send_fds(self._call, [message.encode()], self._held)
        set_torchrun_variables(self.rank, num_ranks, port)
        return store_at(port, timeout_s, listener.detach())


@final
class Worker(Role):
    """A rank that the first one has asked for."""

    def __init__(self, place: RankPlace) -> None:
        self.rank = self.local_rank = place.rank
        self._place = place

    def count(self, ranks: str, wanted: int) -> int:
        return self._place.num_ranks

    def open_store(self, num_ranks: int, timeout_s: float) -> Store:
        set_torchrun_variables(self.rank, num_ranks, self._place.port)
        return store_at(self._place.port, timeout_s)


@final
class Torchrun(Role):
    """A rank that torchrun has started, a program of its own. All use the folder of rank 0."""

    def __init__(self, launch: Launch) -> None:
        self.rank, self.local_rank = launch.rank, launch.local_rank
        self._launch = launch

    def count(self, ranks: str, wanted: int) -> int:
        num_ranks = self._launch.num_ranks
        allowed = f"auto or {num_ranks}, the number of ranks that torchrun has started"
        if ranks != "auto" and int(ranks) != num_ranks:
            raise BadInput("sharding.ranks", ranks, allowed)
        return num_ranks

    def num_local(self, num_ranks: int) -> int:
        return self._launch.num_local_ranks

    def open_store(self, num_ranks: int, timeout_s: float) -> Store:
        return next(rendezvous("env://", self.rank, num_ranks, timeout=timedelta(seconds=timeout_s)))[0]

    def share(self, store: Store, request: Request) -> None:
        config = {key: value for key, value in request["config"].items() if key not in PARENT_ONLY}
        if self.rank == 0:
            shared = {"config": config, **{name: request.get(name) for name in ("folder", "resume", "run")}}
            store.set("request", json.dumps(shared))
        shared = json.loads(store.get("request"))
        if shared.pop("config") != config:
            raise Incompatible(f"rank {self.rank} was started with another configuration than rank 0")
        request.update(shared)

    @property
    def is_unwatched(self) -> bool:
        return True


@final
class SingleProcess(Role):
    """The only rank, in the program's own process."""

    rank = local_rank = 0

    def count(self, ranks: str, wanted: int) -> int:
        if wanted > 1:
            raise BadInput("process", "inline", f"child for {wanted} ranks: each is a process of its own")
        return wanted

    def open_store(self, num_ranks: int, timeout_s: float) -> Store:
        raise AssertionError("one rank meets nobody")


def role_of(place: RankPlace, request: Request) -> Role:
    """The role of a process."""
    if request.get("launch"):
        return Torchrun(Launch(**request["launch"]))
    return Master(place) if place.rank == 0 else Worker(place)


def store_at(port: int, timeout_s: float, listener: int | None = None) -> TCPStore:
    """The store at a port of this machine. The process that hosts it passes its listening socket."""
    timeout, is_master = timedelta(seconds=timeout_s), listener is not None
    return TCPStore(
        HERE,
        port,
        is_master=is_master,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener,
    )


def set_torchrun_variables(rank: int, num_ranks: int, port: int) -> None:
    """Set the environment variables that torchrun would have set, for libraries that read them."""
    words = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ.update({name: str(value) for name, value in words.items()} | {"MASTER_ADDR": HERE})
    os.environ["MASTER_PORT"] = str(port)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo resolves the machine's name, which may fail


class PeerLost(RuntimeError):
    """Another rank did not arrive in time."""


@final
class Rendezvous:
    """This process among the ranks of its point."""

    def __init__(self, role: Role, request: Request) -> None:
        self._role, self._request = role, request
        self._store: Store | None = None
        self._num_ranks, self._timeout_s = 1, 0.0

    @property
    def rank(self) -> int:
        return self._role.rank

    def count(self, ranks: str, wanted: int, device: torch.device, names_card: bool) -> int:
        """How many ranks the point has, by how it was started and by the devices.

        Args:
            ranks: what the user gave for sharding.ranks.
            wanted: how many ranks it asks for, on a single machine.
            names_card: whether the user named a card, such as device=cuda:1.

        Raises:
            BadInput: there are fewer CUDA devices, or torchrun has started another number, or the user named a card for
                several ranks.
        """
        num_ranks = self._role.count(ranks, wanted)
        if num_ranks == 1 or device.type != "cuda":
            return num_ranks
        num_local, num_devices = self._role.num_local(num_ranks), torch.cuda.device_count()
        if num_local > num_devices:
            allowed = f"at most {num_devices}, the number of visible CUDA devices: each rank takes one"
            raise BadInput("sharding.ranks", str(num_local), allowed)
        if names_card:
            allowed = "auto or cuda with several ranks: they take the visible devices in turn (CUDA_VISIBLE_DEVICES)"
            raise BadInput("device", str(device), allowed)
        return num_ranks

    def join(self, num_ranks: int, device: torch.device, timeout_s: float) -> torch.device:
        """Wait for the other ranks and initialize torch.distributed; returns the device of this rank.

        Raises:
            PeerLost: another rank did not come within `timeout_s`.
            Incompatible: under torchrun, ranks were started with different configurations.
        """
        torch.set_num_threads(max(1, self._request["threads"] // self._role.num_local(num_ranks)))
        if num_ranks == 1:
            return device
        self._num_ranks, self._timeout_s = num_ranks, timeout_s
        backend = "gloo"
        if device.type == "cuda":
            device, backend = torch.device("cuda", self._role.local_rank), "cpu:gloo,cuda:nccl"
            torch.cuda.set_device(device)
        timeout = timedelta(seconds=timeout_s)
        self._store = PrefixStore("lowvram", self._role.open_store(num_ranks, timeout_s))
        self._store.set_timeout(timeout)
        self._gather("here")
        self._role.share(self._store, self._request)
        dist.init_process_group(backend, store=self._store, rank=self.rank, world_size=num_ranks, timeout=timeout)
        return device

    def leave(self, fields: dict[str, Any], on_fields: Callable[[int, dict[str, Any]], object]) -> None:
        """Wait until all ranks are done: one that ends earlier would close connections that others still read.

        Args:
            fields: of this rank's row.
            on_fields: called on rank 0 under torchrun with each other rank's number and fields.
        """
        if self._store is None:
            return
        self._store.set(f"fields {self.rank}", json.dumps({"status": "ok", "memory": fields.get("memory", {})}))
        self._gather("done")
        for rank in range(1, self._num_ranks) if self._role.is_unwatched and self.rank == 0 else ():
            on_fields(rank, json.loads(self._store.get(f"fields {rank}")))
        if self.rank == 0:  # it may host the store, so it ends last
            self._gather("gone")
        else:
            self._store.set(f"gone {self.rank}", "")

    def cause_elsewhere(self, fields: dict[str, Any], is_of_a_peer: bool) -> dict[str, Any]:
        """Under torchrun, where no parent sees all ranks: for a rank that failed because of another one, status and
        reason of that one; else empty.

        Args:
            fields: status and reason of this rank.
        """
        if self._store is None or not self._role.is_unwatched:
            return {}
        with suppress(dist.DistError):  # the store is gone too
            if not is_of_a_peer:
                failure = {"status": fields["status"], "reason": f"rank {self.rank}: {fields['reason']}"}
                self._store.set("failed", json.dumps(failure))
            elif self._store.check(["failed"]):
                return json.loads(self._store.get("failed"))
        return {}

    def _gather(self, word: str) -> None:
        """Wait until all ranks have called this with the same word."""
        assert self._store is not None
        self._store.set(f"{word} {self.rank}", "")
        missing, deadline = list(range(self._num_ranks)), time.monotonic() + self._timeout_s
        while missing := [rank for rank in missing if not self._store.check([f"{word} {rank}"])]:
            if time.monotonic() > deadline:
                raise PeerLost(f"waited sharding.timeout_s={self._timeout_s:g} for rank {missing[0]}")
            time.sleep(LOOK_S)
