"""How a rank came into being, and so how it finds the others of its point."""

from __future__ import annotations

import json
import os
import socket
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Any, final

import torch
from torch._C._distributed_c10d import Store, TCPStore  # the public names have no types
from torch.distributed.rendezvous import rendezvous

from lowvram.config.errors import BadInput, Incompatible
from lowvram.config.settings import PARENT_ONLY
from lowvram.launch.supervisor import Place
from lowvram.launch.torchrun import Launch
from lowvram.loops.setup import Sharding, wanted_ranks

HERE = "127.0.0.1"
Request = dict[str, Any]


class Way(ABC):
    """How this process came into being, and so how it finds the others. What a way doesn't say for itself holds for
    ranks of one machine, which a fork server of ours has made."""

    rank: int
    local_rank: int  # among those of this machine

    @abstractmethod
    def count(self, sharding: Sharding, device: torch.device, names_card: bool) -> int:
        """How many ranks the point has; `names_card`: whether the user typed which card, such as device=cuda:1."""

    def num_local(self, num_ranks: int) -> int:
        """How many of them share this machine."""
        return num_ranks

    @abstractmethod
    def open_store(self, num_ranks: int, timeout_s: float) -> Store:
        """The place where all find each other."""

    def share(self, store: Store, request: Request) -> None:  # noqa: B027 (mostly there is nothing to do)
        """Make the requests of all ranks one. The fork server gives all of its ranks the same."""

    @property
    def is_unwatched(self) -> bool:
        """Whether no fork server of ours sees how the other ranks end."""
        return False


@final
class Calling(Way):
    """The first rank of a point: it holds the store and calls the others."""

    def __init__(self, place: Place) -> None:
        assert place.call is not None
        self.rank = self.local_rank = 0
        self._call, self._held = place.call, place.held

    def count(self, sharding: Sharding, device: torch.device, names_card: bool) -> int:
        return wanted_ranks(sharding, device, names_card)

    def open_store(self, num_ranks: int, timeout_s: float) -> Store:
        listener = socket.socket()  # for this machine alone, at a port that is free
        listener.bind((HERE, 0))
        listener.listen()
        port = listener.getsockname()[1]
        told = json.dumps({"num_ranks": num_ranks, "timeout_s": timeout_s, "port": port})
        socket.send_fds(self._call, [told.encode()], self._held)
        introduce(self.rank, num_ranks, port)
        return store_at(port, timeout_s, listener.detach())


@final
class Called(Way):
    """Any other rank of that point."""

    def __init__(self, place: Place) -> None:
        self.rank = self.local_rank = place.rank
        self._place = place

    def count(self, sharding: Sharding, device: torch.device, names_card: bool) -> int:
        return self._place.num_ranks

    def open_store(self, num_ranks: int, timeout_s: float) -> Store:
        introduce(self.rank, num_ranks, self._place.port)
        return store_at(self._place.port, timeout_s)


@final
class Launched(Way):
    """A rank that torchrun has started: a program of its own. The first one's folder is that of all."""

    def __init__(self, launch: Launch) -> None:
        self.rank, self.local_rank = launch.rank, launch.local_rank
        self._launch = launch

    def count(self, sharding: Sharding, device: torch.device, names_card: bool) -> int:
        num_ranks = self._launch.num_ranks
        allowed = f"auto or {num_ranks}, the number of ranks that torchrun has started"
        if sharding.ranks != "auto" and int(sharding.ranks) != num_ranks:
            raise BadInput("sharding.ranks", sharding.ranks, allowed)
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
class Alone(Way):
    """The only rank, in the process of the program itself."""

    rank = local_rank = 0

    def count(self, sharding: Sharding, device: torch.device, names_card: bool) -> int:
        num_ranks = wanted_ranks(sharding, device, names_card)
        if num_ranks > 1:
            raise BadInput("process", "inline", f"child for {num_ranks} ranks: each is a process of its own")
        return num_ranks

    def open_store(self, num_ranks: int, timeout_s: float) -> Store:
        raise AssertionError("one rank meets nobody")


def way_of(place: Place, request: Request) -> Way:
    """The way of the process that stands at `place`."""
    if request.get("launch"):
        return Launched(Launch(**request["launch"]))
    return Calling(place) if place.rank == 0 else Called(place)


def store_at(port: int, timeout_s: float, listener: int | None = None) -> TCPStore:
    """The store at a port of this machine; `listener` is the socket of the one who holds it."""
    timeout, is_master = timedelta(seconds=timeout_s), listener is not None
    return TCPStore(
        HERE,
        port,
        is_master=is_master,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener,
    )


def introduce(rank: int, num_ranks: int, port: int) -> None:
    """What torchrun would have set, for libraries that look for it."""
    words = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ.update({name: str(value) for name, value in words.items()} | {"MASTER_ADDR": HERE})
    os.environ["MASTER_PORT"] = str(port)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # whatever the machine's name may resolve to
