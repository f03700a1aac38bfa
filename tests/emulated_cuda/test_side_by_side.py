"""jobs=N on several CUDA devices, emulated or real: each point and each probe of a search has a device of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.calls import TINY, Outcome
from tests.emulated_cuda.holding import FOLDER, Holding
from tests.laboratory import IS_EMULATED
from tests.tiers import first_of

Call = Callable[..., Outcome]
NUM_DEVICES = torch.cuda.device_count()
pytestmark = [
    pytest.mark.emulated,
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_DEVICES < 2, reason="fewer than two CUDA devices"),
]
OF_ANY_MODEL = tuple(word for word in TINY if not word.startswith("model."))
SEARCH = ("mode=search", *TINY, "device=cuda", "vram=2GiB", "search.groups=[ckpt,accum]", "measure.steps=2")


@pytest.mark.parametrize("jobs", first_of(["auto", str(NUM_DEVICES)]))
def test_the_points_of_a_sweep_run_once_each(train: Call, jobs: str) -> None:
    """What a point measures is that of the same point without `jobs`."""
    words = ("-m", *TINY, "mode=measure", "measure.steps=2", "device=cuda", "ckpt=none,every1", "accum=none,x2")
    beside = train(*words, f"jobs={jobs}", "hydra.sweep.dir=b", timeout_s=400)
    alone = train(*words, "hydra.sweep.dir=a", timeout_s=400)
    assert beside.code == alone.code == 0, beside.said()
    assert len(beside.rows) == 4
    assert set(beside.statuses.values()) == {"ok"}
    for row, other in zip(beside.rows.values(), alone.rows.values(), strict=True):
        assert (row["id"], row["memory"]["peak_bytes"]) == (other["id"], other["memory"]["peak_bytes"])
        assert "jobs=" not in (row["disturbed"] or "")


def test_the_probes_of_a_search_have_a_device_each(train: Call) -> None:
    beside = train(*SEARCH, "jobs=auto", "hydra.run.dir=b", timeout_s=400)
    assert beside.code == 0, beside.said()
    assert beside.out.count(": started, ") == 3
    assert "points run at the same time" not in beside.out
    assert "incompatible" not in beside.out


@pytest.mark.slow
@pytest.mark.skipif(not IS_EMULATED, reason="not the emulated device")
def test_two_hundred_points_over_four_cards(train: Call, tmp_path: Path, record_property: Callable[..., None]) -> None:
    """Each has one row, from a card that no other point has at the same time."""
    held = tmp_path / "held"
    held.mkdir()
    seeds = ",".join(str(seed) for seed in range(200))
    words = (
        "-m",
        *OF_ANY_MODEL,
        "model=external",
        "model.reads=TOKENS",
        f"model.target={Holding.__module__}.Holding",
        "device=cuda",
        "jobs=auto",
    )
    variables = {FOLDER: str(held), "EMULATED_DEVICES": "4"}
    done = train(*words, "model.args={vocab_size: 256}", "mode=train", f"seed={seeds}", env=variables, timeout_s=1800)
    assert done.code == 0, done.said()
    assert len(done.rows) == 200
    assert set(done.statuses.values()) == {"ok"}
    assert sorted(row["provenance"]["seed"] for row in done.rows.values()) == list(range(200))
    numbers = {card.name: card.read_text().split() for card in held.iterdir()}
    assert sorted(numbers) == ["0", "1", "2", "3"]
    processes = [number for each in numbers.values() for number in each]
    assert len(processes) == len(set(processes)) == 200
    record_property("points", 200)
