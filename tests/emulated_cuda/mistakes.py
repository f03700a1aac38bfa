"""Mistakes in the order of copies, planted into a process by tests: each leaves out a wait or something equivalent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowvram.core import host
from lowvram.core.links import CudaLink, PendingCopy, nothing
from lowvram.knobs.offload.transfer import Streams
from lowvram.knobs.weights.returns import Arriving, Returns


@dataclass(frozen=True)
class Mistake:
    """A mistake that must change the results of the case of that name in races.py."""

    case: str
    plant: Callable[[], None]


def instead(owner: Any, method: str, replacement: Callable[..., Any]) -> Callable[[], None]:
    return lambda: setattr(owner, method, replacement)


def doing_nothing(owner: Any, method: str) -> Callable[[], None]:
    return instead(owner, method, lambda *_: None)


def never_waits(owner: Any, stream: str) -> Callable[[], None]:
    """The stream of that attribute doesn't wait for the computing stream."""
    make = owner.__init__

    def make_unsynchronised(self: Any, *args: Any) -> None:
        make(self, *args)
        getattr(self, stream).wait_stream = lambda _: None

    return instead(owner, "__init__", make_unsynchronised)


def finish_without_waiting(link: CudaLink) -> None:
    link.to_host.popleft().then()


START = CudaLink._start


def start_without_source(link: CudaLink, *args: Any) -> PendingCopy:
    return START(link, *args)._replace(source=torch.empty(0))


def settle_at_once(returns: Returns, arriving: Arriving) -> None:
    SETTLE(returns, arriving._replace(wait=nothing))


SETTLE = Returns.settle


def take_and_settle(returns: Returns, weight: nn.Parameter, gradient: Tensor) -> None:
    """The host adds a gradient, and computes with it, while it is copied."""
    TAKE(returns, weight, gradient)
    settle_at_once(returns, returns.arriving.pop())


TAKE = Returns.take


def move_and_overwrite(tensor: Tensor, device: torch.device) -> Tensor:
    """Overwrites a pinned part of a batch as soon as its copy is queued."""
    there = tensor.to(device, non_blocking=True)
    if tensor.is_pinned():
        tensor.zero_()
    return there


MISTAKES = {
    "what leaves is copied too early": Mistake("activations", never_waits(Streams, "_out")),
    "what comes back is copied too early": Mistake("activations", never_waits(Streams, "_back")),
    "nobody waits for what leaves or comes back": Mistake("activations", doing_nothing(Streams, "_wait_for")),
    "what nobody reads is freed while it comes back": Mistake("activations", doing_nothing(Tensor, "record_stream")),
    "a file's pages are read too early": Mistake("activations_disk", doing_nothing(Streams, "_wait_for")),
    "gradients are copied too early": Mistake("cpu_offload", never_waits(CudaLink, "down")),
    "gradients are used before they have arrived": Mistake(
        "cpu_offload", instead(CudaLink, "_finish_oldest", finish_without_waiting)
    ),
    "gradients are freed while they are copied": Mistake(
        "in_backward", instead(CudaLink, "_start", start_without_source)
    ),
    "sums come back into memory that is still read": Mistake("in_backward", never_waits(CudaLink, "up")),
    "the next step doesn't wait for the weights": Mistake("cpu_offload", doing_nothing(CudaLink, "join")),
    "blocks are gathered without waits": Mistake("parameters", doing_nothing(torch.cuda.Stream, "wait_event")),
    "weights are written over while they are read": Mistake("stream", never_waits(CudaLink, "up")),
    "weights are read before they have arrived": Mistake("stream", doing_nothing(CudaLink, "_wait_for")),
    "gradients of streamed weights are copied too early": Mistake("stream", never_waits(CudaLink, "down")),
    "gradients of streamed weights are used before they have arrived": Mistake(
        "stream", instead(CudaLink, "_finish_oldest", finish_without_waiting)
    ),
    "gradients of streamed weights are freed while they are copied": Mistake(
        "stream", instead(CudaLink, "_start", start_without_source)
    ),
    "a weight's update reads a gradient that is on its way": Mistake(
        "stream", instead(Returns, "settle", settle_at_once)
    ),
    "the host goes on before its gradients have arrived": Mistake("stream", instead(Returns, "take", take_and_settle)),
    "a pinned batch is overwritten while it is copied": Mistake("workers", instead(host, "moved", move_and_overwrite)),
}
