"""allocator: malloc's own settings on the CPU, the caching allocator's on CUDA."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lowvram.config.errors import BadInput, Incompatible
from lowvram.config.identity import ROOT
from lowvram.core.assemble import assemble
from lowvram.core.knob import Knob
from lowvram.core.step import step
from lowvram.knobs.allocator import (
    LARGEST_MMAP_THRESHOLD,
    M_MMAP_THRESHOLD,
    M_TRIM_THRESHOLD,
    MALLOC_WORDS,
    Default,
    Expandable,
    Tight,
)
from lowvram.launch.client import LIBRARIES
from tests.laboratory import CPU, PROBLEMS, knobs_of, make_batch, needs_gpu

# A process of its own: malloc can't be asked for its settings, nor be set back.
FREED_MEMORY = """
import torch
from lowvram.knobs.allocator import {knob}
from lowvram.loops.fields import status_bytes

{knob}().apply(None)
before = status_bytes("VmRSS")
tensors = [torch.ones(100_000, dtype=torch.uint8) for _ in range(400)]
del tensors[:-1]  # the last one lies above the others in the heap
print(status_bytes("VmRSS") - before)
"""

# 20 MiB a step, in pieces of which none is large.
FAULTS_OF_A_STEP = """
import resource, torch
from lowvram.knobs.allocator import Default, Tight

{prepare}
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(2**22, dtype=torch.uint8) for _ in range(5)]
    del tensors
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


# The scratch memory of this product is 12 MiB.
LEFT_BY_A_PRODUCT = """
import torch
from lowvram.knobs.allocator import Tight
from lowvram.loops.fields import status_bytes

Tight().apply(None)
torch.set_num_threads(1)
one, other, product = torch.ones(2048, 256), torch.ones(256, 8000), torch.zeros(2048, 8000)
torch.mm(torch.ones(64, 64), torch.ones(64, 64))
before = status_bytes("VmData")
torch.mm(one, other, out=product)
print(status_bytes("VmData") - before)
"""


def printed_by(program: str, **environment: str) -> str:
    command, variables = [sys.executable, "-c", program], {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=variables).stdout.strip()


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL")
@pytest.mark.slow
def test_a_product_leaves_no_scratch_memory_behind_in_a_point() -> None:
    assert int(printed_by(LEFT_BY_A_PRODUCT, **LIBRARIES)) <= 2**20  # by which the heap may have grown


def kept_bytes(knob: str) -> int:
    """Resident bytes that stay of 40 MB after they were freed."""
    return int(printed_by(FREED_MEMORY.format(knob=knob)))


@pytest.mark.slow
def test_tight_gives_freed_memory_back() -> None:
    assert kept_bytes("Tight") < 10e6 < 30e6 < kept_bytes("Default")


def faults_of_a_step(prepare: str) -> int:
    return int(printed_by(FAULTS_OF_A_STEP.format(prepare=prepare)))


@pytest.mark.slow
def test_by_default_a_step_takes_the_pages_of_the_step_before() -> None:
    """Beside `tight`: what malloc does as it comes is chance."""
    assert faults_of_a_step("Tight().set_malloc(); Default().set_malloc()") < 100
    assert faults_of_a_step("Tight().set_malloc()") > 1000


@pytest.mark.parametrize("word", [None, *MALLOC_WORDS])
def test_what_the_user_has_set_of_malloc_stays(word: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    set_to = dict[int, int]()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=set_to.__setitem__))
    for each in MALLOC_WORDS:
        monkeypatch.delenv(each, raising=False)
    if word:
        monkeypatch.setenv(word, "131072")
    Default().set_malloc()
    assert set_to == ({} if word else {M_MMAP_THRESHOLD: LARGEST_MMAP_THRESHOLD, M_TRIM_THRESHOLD: 2**26})


@pytest.mark.parametrize("threshold", [0, -1, LARGEST_MMAP_THRESHOLD + 1])
def test_a_threshold_that_malloc_would_refuse_is_named(threshold: int) -> None:
    with pytest.raises(BadInput, match=rf"allocator\.mmap_threshold_bytes={threshold}: must be between 1 and 33554432"):
        Tight(threshold)


def test_expandable_adds_to_what_the_user_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = assemble(PROBLEMS["transformer"], {}, CPU)
    for before, after in (("", "expandable_segments:True"), ("a:1", "a:1,expandable_segments:True")):
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", before)
        assert Expandable().apply(rig) is rig
        assert os.environ["PYTORCH_ALLOC_CONF"] == after


@pytest.mark.parametrize("knob", [Default(empty_cache_every=3), Expandable(empty_cache_every=3)])
def test_the_cache_is_emptied_after_every_third_step(knob: Knob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    task, emptied, after = PROBLEMS["transformer"], [], []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    rig = assemble(task, knobs_of(), CPU)
    rig = replace(rig, finish=knob.apply(rig).finish)
    for seed in range(7):
        step(rig, make_batch(task.spec, 2, seed))
        after.append(len(emptied))
    assert after == [0, 0, 1, 1, 1, 2, 2]


def test_emptying_a_cache_needs_one() -> None:
    with pytest.raises(Incompatible, match="allocator=default needs that the device is an NVIDIA GPU"):
        assemble(PROBLEMS["transformer"], {**knobs_of(), "allocator=default": Default(empty_cache_every=1)}, CPU)


@pytest.mark.parametrize("knob", [Default, Expandable])
def test_steps_between_are_at_least_one(knob: type[Default]) -> None:
    with pytest.raises(BadInput, match=r"allocator\.empty_cache_every=0: must be null \(never\) or at least 1"):
        knob(empty_cache_every=0)


SEGMENTS = """
import torch
from lowvram.core.assemble import assemble
from lowvram.knobs.allocator import Expandable
from tests.laboratory import PROBLEMS

assemble(PROBLEMS["transformer"], {"allocator": Expandable()}, torch.device("cuda"))
print(all(segment["is_expandable"] for segment in torch.cuda.memory_snapshot()))
"""


@pytest.mark.gpu
@needs_gpu[1]
def test_expandable_segments_are_used_on_a_card() -> None:
    assert printed_by(SEGMENTS) == "True"
