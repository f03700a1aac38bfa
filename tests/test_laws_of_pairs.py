"""The law of every pair of YAMLs in conf/: law 5, after those of one knob in tests/test_laws.py."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from lowvram.config.errors import Incompatible
from lowvram.core import assemble as assembling
from lowvram.core.assemble import assemble
from lowvram.core.device import absent_facts
from lowvram.core.fact import Fact, ModelFact
from lowvram.core.knob import Knob, conflicts
from lowvram.knobs.ckpt import RecomputeEvery
from scripts.pages.pairs import all_pairs, covering_rows
from tests.laboratory import (
    CPU,
    FACT_NAMES,
    KNOBS,
    NEUTRAL,
    OPTIONS,
    PROBLEMS,
    WITH_DROPOUT,
    fitting,
    is_for,
    knobs_of,
    named,
    train,
)
from tests.test_laws import Pair, words
from tests.tiers import first_of

pytestmark = [
    pytest.mark.medium,
    pytest.mark.sampled(3),
    pytest.mark.usefixtures("compiled_quickly", "same_process_afterwards"),
]


# Any two options either train together or say why not.


def why_not(pairs: frozenset[Pair]) -> list[str]:
    """The conflicts among options, and with this machine."""
    return conflicts(named(*pairs), absent_facts(CPU))


PAIRS = all_pairs(KNOBS)
REFUSED = {two for two in PAIRS if why_not(two)}


def refused_in(row: frozenset[Pair]) -> list[str]:
    """As `why_not`, sooner: a conflict is between two options, or between one and this machine."""
    return ["refused"] if any(frozenset(two) in REFUSED for two in combinations(row, 2)) else []


ROWS = covering_rows(PAIRS - REFUSED, refused_in)
# One graph of all chunks, or of all roundings; many small tensors in codes.
TAKE_LONG = [{("compile", "model"), ("tile", tile)} for tile in ("mlp", "blocks")]
TAKE_LONG += [{("compile", what), ("qat", option)} for what in ("blocks", "model") for option in ("int8", "int4")]
TAKE_LONG += [{("activations", option), ("tile", "blocks")} for option in ("int8", "int4")]


def test_every_pair_of_options_is_in_a_row_or_refused() -> None:
    covered = set().union(*map(all_pairs, ROWS))
    assert covered | REFUSED == PAIRS
    assert not covered & REFUSED
    assert not any(map(why_not, ROWS))
    assert len(PAIRS) == sum(len(OPTIONS[one]) * len(OPTIONS[other]) for one, other in combinations(NEUTRAL, 2))


def plain(problem: str) -> str:
    """The name of a problem's twin without dropout."""
    return problem.removesuffix("_dropout")


def on_each_model(row: frozenset[Pair]) -> list[Any]:
    """A configuration on each model, first on one that can have most of its options."""
    models = sorted(WITH_DROPOUT, key=lambda model: sum(not is_for(KNOBS[pair], plain(model)) for pair in row))
    return first_of([(row, model) for model in models], num=int(not any(row >= long for long in TAKE_LONG)))


@pytest.mark.sampled(15)
@pytest.mark.parametrize(
    ("row", "problem"),
    [case for row in ROWS for case in on_each_model(row)],
    ids=lambda value: value if isinstance(value, str) else words(value - NEUTRAL.items()),
)
def test_options_that_say_nothing_train_together(row: frozenset[Pair], problem: str) -> None:
    train_together(row, problem)


def train_together(row: frozenset[Pair], problem: str) -> None:
    """A whole configuration trains, without the options that the model can't have, or an assertion fails."""
    knobs = knobs_of(**{group: option for group, option in row if is_for(KNOBS[group, option], plain(problem))})
    trained = train(PROBLEMS[fitting(problem, knobs)], knobs, [32])
    assert all(loss.isfinite() for loss in trained.losses)
    assert all(update.applied or update.recoverable for update in trained.updates)
    assert all(gradient.isfinite().all() for gradient in trained.gradients.values())


def test_options_that_conflict_say_so() -> None:
    for pairs in REFUSED:
        culprits = [name for name, knob in named(*pairs).items() if knob.needs() or knob.breaks()]
        sentences = why_not(pairs)
        assert any(f"{name} needs that" in sentence for name in culprits for sentence in sentences), pairs


@pytest.mark.parametrize("step", [25, pytest.param(1, marks=pytest.mark.slow)])
def test_they_say_so_before_a_weight_has_memory(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    monkeypatch.setattr(assembling, "materialise", lambda *_: pytest.fail("the weights have memory"))
    for pairs in sorted(REFUSED, key=sorted)[::step]:
        with pytest.raises(Incompatible) as refusal:
            assemble(PROBLEMS["transformer"], knobs_of(**dict(pairs)), CPU)
        assert any(sentence in str(refusal.value) for sentence in why_not(pairs)), pairs


# Second half: a fact that a knob claims to break is really broken.


def unshown(knobs: dict[Pair, Knob]) -> set[str]:
    """The tests that are missing: `test_without_<fact>` of the group whose knob breaks it shows what goes wrong."""
    wanted = {
        (group, f"test_without_{name_of(fact).lower()}") for (group, _), knob in knobs.items() for fact in knob.breaks()
    }
    return {name for group, name in wanted if f"def {name}" not in source_of_tests(group)}


def name_of(fact: Fact | ModelFact) -> str:
    return fact.name if isinstance(fact, Fact) else FACT_NAMES[fact]


def source_of_tests(group: str) -> str:
    rooms = [Path(__file__).parent / room for room in ("knobs", "compress")]
    return "".join(path.read_text() for room in rooms for path in room.glob(f"test_{group}*.py"))


def test_every_broken_fact_is_shown_to_be_real() -> None:
    class Breaker(RecomputeEvery):
        def breaks(self) -> frozenset[Fact]:
            return frozenset({Fact.WHOLE_PARAMS})

    assert unshown({("ckpt", "breaker"): Breaker()}) == {"test_without_whole_params"}
    assert unshown(KNOBS) == set()
