"""Plans and searches of models of transformers, from local folders: six families, from the command line."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.calls import Outcome, read_row
from tests.hugging import CONFIGS, tiny

Call = Callable[..., Outcome]
WORDS = (
    "model=hf",
    "data=synthetic",
    "data.sequence_length=16",
    "data.image_size=16",
    "data.num_classes=4",
    "data.eval_samples=4",
    "train.batch_size=4",
    "logger=none",
)


@pytest.mark.slow
def test_all_of_them_are_planned(call: Call) -> None:
    """Every parameter counts, with its gradient and both moments; and something is kept for the backward pass."""
    outcome = call("-m", "mode=plan", *WORDS, f"model.name={','.join(map(tiny, CONFIGS))}")
    assert outcome.code == 0, outcome.said()
    rows = {row["config"]["model"]["name"]: row for row in outcome.rows.values()}
    for kind in CONFIGS:
        plan, num_bytes = rows[tiny(kind)]["plan"], 4 * rows[tiny(kind)]["model"]["parameters"]
        least = {"parameters": num_bytes, "gradients": num_bytes / 2, "optimizer": 2 * num_bytes, "activations": 1}
        assert num_bytes > 0
        assert all(plan["by_kind_max"][name] >= wanted for name, wanted in least.items()), kind


@pytest.mark.slow
def test_a_search_ends_with_the_fastest_that_fits(call: Call) -> None:
    words = ("search.groups=[ckpt,accum]", "search.probes=1", "measure.max_seconds=0.2")
    outcome = call("mode=search", "device=cpu", "vram=300MiB", *words, *WORDS, f"model.name={tiny('bert')}")
    assert outcome.code == 0, outcome.said()
    (path,) = outcome.cwd.glob("outputs/**/result.json")
    row = read_row(path.parent)
    assert row["status"] == "ok"
    assert row["plan"]["allocated_bytes"] == pytest.approx(row["memory"]["peak_bytes"], rel=0.05)
    assert "the fastest: " in outcome.out
