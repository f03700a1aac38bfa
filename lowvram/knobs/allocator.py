"""allocator: how the process gets and returns memory. It takes effect before the device is first used."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass, replace
from itertools import count

import torch

from lowvram.config.errors import require
from lowvram.core.fact import Fact
from lowvram.core.knob import Knob, Stage
from lowvram.core.rig import Rig

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # malloc.h
LARGEST_MMAP_THRESHOLD = 2**25
MALLOC_WORDS = "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"  # environment variables


class Allocator(Knob):
    """The base of this group's options."""

    stage = Stage.PROCESS

    def set_malloc(self) -> None:
        """Set glibc's thresholds, for the rest of the process, to the largest values that glibc would raise them to.
        Does nothing with another C library, or if the environment sets them."""
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt and not any(word in os.environ for word in MALLOC_WORDS):
            mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
            mallopt(M_TRIM_THRESHOLD, 2 * LARGEST_MMAP_THRESHOLD)

    def under_cap(self) -> tuple[str, Allocator] | None:
        """The name and the option that replace this one if `vram` limits memory on a CPU; None: it isn't replaced."""
        return None


@dataclass(frozen=True)
class Default(Allocator):
    """torch's CUDA caching allocator with its defaults, and the C library's malloc with its largest thresholds.

    glibc raises its thresholds by itself when large blocks are freed, at most to these. Until then it may return pages
    to the system and get them again in every step, which costs some percent of the step's time and varies from run to
    run (docs/results/cpu/bench_trainer.md has measurements).
    """

    empty_cache_every: int | None = None

    def __post_init__(self) -> None:
        require_every(self.empty_cache_every)

    def needs(self) -> frozenset[Fact]:
        return frozenset() if self.empty_cache_every is None else frozenset({Fact.CUDA})

    def apply(self, rig: Rig) -> Rig:
        self.set_malloc()
        return emptying(rig, self.empty_cache_every)

    def under_cap(self) -> tuple[str, Allocator] | None:
        """Under a limit malloc must not keep freed memory."""
        return ("tight", Tight()) if self == Default() else None


@dataclass(frozen=True)
class Expandable(Allocator):
    """CUDA segments that grow instead of fragmenting (PYTORCH_ALLOC_CONF=expandable_segments:True)."""

    empty_cache_every: int | None = None

    expandable_segments = True
    needs_always = frozenset({Fact.CUDA})

    def __post_init__(self) -> None:
        require_every(self.empty_cache_every)

    def apply(self, rig: Rig) -> Rig:
        others = [word for word in os.environ.get("PYTORCH_ALLOC_CONF", "").split(",") if word]
        os.environ["PYTORCH_ALLOC_CONF"] = ",".join([*others, "expandable_segments:True"])
        return emptying(rig, self.empty_cache_every)


def require_every(num_steps: int | None) -> None:
    allowed = "null (never) or at least 1 step"
    require(num_steps is None or num_steps >= 1, "allocator.empty_cache_every", num_steps, allowed)


def emptying(rig: Rig, num_steps: int | None) -> Rig:
    """The rig that returns the CUDA allocator's free memory to the driver after every `num_steps` steps."""
    if num_steps is None:
        return rig
    steps = count(1)

    def finish() -> None:
        if next(steps) % num_steps == 0:
            torch.cuda.empty_cache()

    return replace(rig, finish=finish)


@dataclass(frozen=True)
class Tight(Allocator):
    """On the CPU: freed memory returns to the system at once, so the process is as large as its live tensors and what
    libraries and threads hold. Slower: docs/knobs.md has figures."""

    mmap_threshold_bytes: int = 65536

    needs_always = frozenset({Fact.CPU})

    def __post_init__(self) -> None:
        allowed = f"between 1 and {LARGEST_MMAP_THRESHOLD} (glibc's limit)"
        fits = 1 <= self.mmap_threshold_bytes <= LARGEST_MMAP_THRESHOLD
        require(fits, "allocator.mmap_threshold_bytes", self.mmap_threshold_bytes, allowed)

    def apply(self, rig: Rig) -> Rig:
        self.set_malloc()
        return rig

    def set_malloc(self) -> None:
        """Set glibc's thresholds for the rest of the process."""
        libc = ctypes.CDLL(None)
        settings = ((M_MMAP_THRESHOLD, self.mmap_threshold_bytes), (M_TRIM_THRESHOLD, 0), (M_ARENA_MAX, 1))
        for parameter, value in settings:
            if libc.mallopt(parameter, value) != 1:
                raise OSError(f"mallopt({parameter}, {value}) was refused by the C library")
