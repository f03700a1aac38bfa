"""Every pair of options that a card can have trains on the emulated device as the plain loop does on the CPU: the
configurations of scripts/pages/compatibility.py, within its tolerances, in one process; with ranks, in two."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from lowvram.config.registry import all_options
from lowvram.core.device import absent_facts
from lowvram.core.fact import Fact
from scripts.pages.compatibility import deviation, is_its_own, varied, without_lacked
from scripts.pages.pairs import Row, all_pairs, covering_rows, why_not
from tests.emulated_cuda.configurations import CUDA, History, history, history_on_rank
from tests.laboratory import CPU, IS_EMULATED, KNOBS
from tests.ranks import on_cards

if not IS_EMULATED:
    pytest.skip("not the emulated device", allow_module_level=True)

pytestmark = [pytest.mark.emulated, pytest.mark.usefixtures("compiled_quickly", "same_process_afterwards")]
ABSENT = absent_facts(CUDA)


def why_not_here(options: Row) -> list[str]:
    return why_not(options, ABSENT)


PAIRS = {pair for pair in all_pairs(all_options()) if not why_not_here(pair)}
ROWS = covering_rows(PAIRS, why_not_here)


@cache
def plain_history(own: Row, problem: str) -> History:
    """On the CPU, with those of a row's options that decide what is learnt."""
    return history(own, problem, CPU)


@pytest.mark.parametrize("problem", ["transformer", "resnet"])
@pytest.mark.parametrize(
    ("number", "row"), list(enumerate(ROWS)), ids=lambda each: each if isinstance(each, int) else varied(each)
)
def test_a_configuration_trains_as_the_plain_loop_on_the_cpu(
    number: int, row: Row, problem: str, record_property: Callable[[str, object], None]
) -> None:
    row = without_lacked(row, problem)
    is_for_ranks = any(Fact.MANY_RANKS in KNOBS[option].needs() for option in row)
    found = on_cards(history_on_rank, row, problem) if is_for_ranks else [history(row, problem, CUDA)]
    wanted = plain_history(frozenset(filter(is_its_own, row)), problem)
    for each in found:
        assert deviation(row, each, wanted) is None
    earlier = ROWS[:number]
    record_property("pairs", len(all_pairs(row) - set[Row]().union(*map(all_pairs, earlier))))
