"""Conflicts between knobs, and with the machine: all at once, in English."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from lowvram.core.fact import Fact
from lowvram.core.knob import WRITES, Knob, Stage, conflicts
from lowvram.core.rig import Rig


@dataclass(frozen=True)
class Wishes(Knob):
    """A knob that does nothing but need and break facts."""

    needed: frozenset[Fact] = frozenset()
    broken: frozenset[Fact] = frozenset()
    stage = Stage.BATCH

    def needs(self) -> frozenset[Fact]:
        return self.needed

    def breaks(self) -> frozenset[Fact]:
        return self.broken

    def apply(self, rig: Rig) -> Rig:
        return rig


def needing(*facts: Fact) -> Wishes:
    return Wishes(needed=frozenset(facts))


def breaking(*facts: Fact) -> Wishes:
    return Wishes(broken=frozenset(facts))


def test_knobs_that_ask_for_nothing_have_no_conflict() -> None:
    assert conflicts({"a=1": needing(), "b=2": breaking(Fact.FULL_LOGITS)}, {Fact.CUDA: "none here"}) == []


def test_every_conflict_is_reported_once_with_both_names_or_with_the_remedy() -> None:
    knobs = {
        "precision=tf32": needing(Fact.TF32),
        "stepping=plain": needing(Fact.GRADS_AT_UPDATE, Fact.WHOLE_PARAMS),
        "ckpt=eager": breaking(Fact.GRADS_AT_UPDATE),
        "sharding=split": breaking(Fact.GRADS_AT_UPDATE, Fact.WHOLE_PARAMS),
    }
    assert conflicts(knobs, {Fact.TF32: "it is the CPU here: use precision=fp32", Fact.MANY_RANKS: "it has one"}) == [
        "precision=tf32 needs that the device multiplies in TF32: it is the CPU here: use precision=fp32",
        "stepping=plain needs that every gradient is alive when the update runs, and ckpt=eager ends that",
        "stepping=plain needs that every gradient is alive when the update runs, and sharding=split ends that",
        "stepping=plain needs that every parameter is whole on its rank, and sharding=split ends that",
    ]


@pytest.mark.parametrize("fact", Fact)
def test_a_fact_reads_as_the_end_of_a_sentence(fact: Fact) -> None:
    assert fact.value[0].islower()
    assert not fact.value.endswith(".")


def test_every_stage_says_what_it_may_write() -> None:
    assert WRITES.keys() == set(Stage)
