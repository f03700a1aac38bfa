"""Random generators: which of them moved, and that they go on where they were."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lowvram.core import generators
from lowvram.core.generators import NUM_FULL_LOOKS, OfNumpyGlobally, same_draws_afterwards, seed_all, source_of

DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(5).tolist(),
    "numpy": lambda: np.random.rand(5).tolist(),
    "numpy's normal numbers, drawn in pairs": lambda: np.random.randn(),
    "Python": lambda: [random.random() for _ in range(5)],
    "Python's normal numbers, drawn in pairs": lambda: random.gauss(0, 1),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("num_before", [0, 1, 700])
def test_random_numbers_go_on_where_they_were(name: str, num_before: int, tmp_path: Any) -> None:
    """Also read from a file without any pickled object."""
    draw = DRAWS[name]
    seed_all(3)
    for _ in range(num_before):
        draw()
    torch.save(generators.saved(), tmp_path / "state")
    wanted = [draw() for _ in range(3)]
    seed_all(4)
    generators.load(torch.load(tmp_path / "state", weights_only=True))
    assert [draw() for _ in range(3)] == wanted


def test_what_an_early_version_saved_can_be_loaded() -> None:
    state = torch.get_rng_state()
    wanted = torch.rand(3)
    generators.load({"cpu": state})
    assert torch.equal(torch.rand(3), wanted)


@pytest.mark.parametrize("name", DRAWS)
def test_draws_that_change_nothing_afterwards(name: str) -> None:
    draw = DRAWS[name]
    seed_all(0)
    draw()
    with same_draws_afterwards():
        wanted = [draw() for _ in range(3)]
    assert [draw() for _ in range(3)] == wanted


def test_numpys_generator_is_known_by_its_words_after_some_looks() -> None:
    source = OfNumpyGlobally()
    seed_all(0)
    looks = [source.state() for _ in range(NUM_FULL_LOOKS)]
    assert all(look.whole is not None for look in looks)
    before = source.state()
    assert before.whole is None
    assert before == looks[-1]  # whole or not
    assert source.state() == before
    wanted = np.random.rand(3)
    assert source.state() != before
    source.restore(before)
    assert (np.random.rand(3) == wanted).all()
    assert source.state().whole is not None  # from now on, as something draws


@pytest.mark.parametrize(
    "held",
    [torch.Generator(), np.random.default_rng(0), np.random.RandomState(0), random.Random(0)],
    ids=["torch", "numpy", "numpy before", "Python"],
)
def test_a_generator_that_a_module_holds_is_looked_at(held: Any) -> None:
    def draw() -> float:
        if isinstance(held, torch.Generator):
            return float(torch.rand((), generator=held))
        return (
            held.normal()
            if isinstance(held, np.random.Generator)
            else held.gauss(0, 1)
            if isinstance(held, random.Random)
            else held.randn()
        )

    module = nn.Sequential(nn.Linear(1, 1))
    module[0].draws = held
    assert source_of(held) is not None
    with same_draws_afterwards(module):
        wanted = draw()
    assert draw() == wanted
