"""How much of the time that weights travel is hidden behind the computation, with weights=stream.

    scripts/python scripts/benchmarks/bench_stream.py [ROUNDS]

A model of 16 equal blocks, on a CPU. Each block computes for a known time, forwards and backwards: it sleeps, so that
busy cores don't matter. Copies are made by threads, each after the time that its bytes take at a given rate
(timed_link.py), weights and gradients alike. Steps whose copies take no time, and steps whose copies take theirs, take
turns. Hidden is the share of the weights' travelling time by which the step didn't become longer: the median of the
rounds, with their range. The first block's way there and the last gradients' way back are never hidden. Where copies
take longer than the computation, only as much can be hidden as there is computation.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowvram.compat.replaced import replaced
from lowvram.config.registry import knob_of, neutral_options
from lowvram.core import host
from lowvram.core.assemble import assemble
from lowvram.core.rig import Part, Rig
from lowvram.core.step import step
from lowvram.data.spec import DataSpec, Modality
from lowvram.knobs.weights import stream
from lowvram.models.transformer import TransformerConfig
from lowvram.tasks import Auto
from scripts.benchmarks.timed_link import TimedLink

CPU = torch.device("cpu")
NUM_BLOCKS, COMPUTE_S = 16, 0.03  # of a block, one way
SHARES = (0.25, 0.5, 0.9, 2.0)  # of a block's computation that its copy takes
SPEC = DataSpec(Modality.TOKENS, 11, (8,))
MODEL = TransformerConfig(num_layers=NUM_BLOCKS, width=32, num_heads=2, context=8)


class Computes(torch.autograd.Function):
    """The identity, which takes `COMPUTE_S` each way."""

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        time.sleep(COMPUTE_S)
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        time.sleep(COMPUTE_S)
        return gradient


class Took(NamedTuple):
    """A step."""

    step_s: float
    sent_bytes: int  # to the device


def streaming() -> Rig:
    """A rig whose weights stream, and whose blocks take their time."""
    options = {**neutral_options(), "weights": "stream"}
    knobs = {f"{group}={option}": knob_of((group, option)) for group, option in options.items()}
    rig = assemble(Auto().pose(MODEL, SPEC), knobs, CPU)
    for block in rig.structure.blocks:
        forward = block.forward
        block.forward = lambda *given, forward=forward: Computes.apply(forward(*given))
    return rig


def timed(rig: Rig) -> Took:
    tokens = torch.randint(11, (4, 8))
    batch, before, began = Part(tokens, tokens), replace(host.traffic), time.perf_counter()
    step(rig, batch)
    return Took(time.perf_counter() - began, host.traffic.to_device_bytes - before.to_device_bytes)


@contextmanager
def linked(link: TimedLink) -> Iterator[None]:
    """Inside it weights that stream go over the link."""
    with replaced(stream, "link_to", lambda device: link):
        yield


def hidden(share: float, rounds: int) -> list[float]:
    """Of the time that weights travel to the device, where a block's take `share` of its computation's time."""
    link, found = TimedLink(at_once), list[float]()
    with linked(link):
        rig = streaming()
        block_bytes = sum(each.nbytes for each in rig.structure.blocks[0].parameters())
        rate = block_bytes / (share * COMPUTE_S)
        timed(rig)
        for _ in range(rounds):
            link.delay = at_once
            alone = timed(rig)
            link.delay = lambda num_bytes: num_bytes / rate
            beside = timed(rig)
            found.append(1 - (beside.step_s - alone.step_s) / (beside.sent_bytes / rate))
    return found


def at_once(num_bytes: int) -> float:
    return 0.0


def main(rounds: str = "5") -> None:
    show = partial(print, flush=True)
    show("| a block's copy, of its computation | hidden | range |\n|---:|---:|---:|")
    for share in SHARES:
        found = sorted(hidden(share, int(rounds)))
        show(f"| {share:.0%} | {median(found):.1%} | {found[0]:.1%}–{found[-1]:.1%} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
