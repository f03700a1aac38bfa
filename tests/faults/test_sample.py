"""A sample of the fault suite in every run of the tests, and a campaign of some size in `scripts/test all`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from lowvram.config.defaults import CONF
from lowvram.results.metric_lines import read_lines
from tests.faults import campaign, shim
from tests.faults.configurations import OTHERWISE, configuration, groups, mistakes
from tests.faults.flips import is_told, lines_about
from tests.faults.foreign import Foreign
from tests.faults.hostile import line_of
from tests.faults.results import differences
from tests.faults.telling import Draw
from tests.faults.warm import import_unless_lacking

WHAT = campaign.wanted(["only=train,load"])  # a sample: one program that is undisturbed first, and its readers
needs_compiler = pytest.mark.skipif(shim.compiler() is None, reason="needs a C compiler (cc): the shim is compiled")


def made(tmp_path: Path, *words: str) -> dict[str, dict[str, int]]:
    """A campaign: its table; fails with what its trials say."""
    out = tmp_path / "campaign.json"
    campaign.main([*words, f"out={out}"])
    told = json.loads(out.read_text())
    assert not told["failed"], "\n".join(campaign.describe(one, campaign.wanted(words)) for one in told["failed"])
    return told["kinds"]


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[campaign.Worker]:
    """A warm process that makes the trials of a sample, and knows the results of their undisturbed programs."""
    worker = campaign.Worker(tmp_path_factory.mktemp("faults") / "worker")
    for kind in ("writes", "flips"):
        one = worker.make(kind, 0, WHAT)
        assert not one["problems"], campaign.describe(one, WHAT)  # also if the worker can't start
    yield worker
    worker.stop()


@needs_compiler
@pytest.mark.medium
@pytest.mark.parametrize("kind", ["kills", "writes", "flips", "configurations", "hostile"])
def test_a_sample_of_each_kind(worker: campaign.Worker, kind: str) -> None:
    one = worker.make(kind, 1, WHAT)
    assert not one["problems"], campaign.describe(one, WHAT)


@needs_compiler
@pytest.mark.slow
def test_a_campaign(tmp_path: Path) -> None:
    made(tmp_path, "kills=100", "writes=100", "flips=100", "configurations=200", "ranks=24", "hostile=80", "seed=1")


def test_the_words_of_a_campaign() -> None:
    what = campaign.wanted(["kills=2", "flips=1", "seed=5"])
    assert (what.seed, what.jobs()) == (5, [("kills", 0), ("flips", 0), ("kills", 1)])
    assert campaign.wanted(["replay=kills:7"]).jobs() == [("kills", 7)]
    with pytest.raises(SystemExit, match="kils=1: no such word"):
        campaign.wanted(["kils=1"])


def test_every_call_has_its_turn() -> None:
    numbers = [Draw("writes", 0, 3).in_turn(number, 50) for number in range(50)]
    assert sorted(numbers) == list(range(1, 51))
    assert numbers != sorted(numbers)


def test_a_program_tells_of_damage_in_a_line_about_the_damaged_file() -> None:
    lost = "/run outputs/run/metrics: 9 instead of 12: []"
    of_another = "step_x.pt is passed over: it doesn't match, as it has no hash in its name"
    path = Path("work/outputs/run/metrics.jsonl")
    assert not is_told(lost, lines_about(path, of_another))
    assert not is_told(lost, lines_about(path, "outputs/run/metrics.jsonl\nresult.json is damaged"))
    about_it = lines_about(path, f"{of_another}\noutputs/run/metrics.jsonl: 3 damaged lines are left out")
    assert is_told(lost, about_it)
    assert not is_told("/run outputs/run/loss: 1.0 instead of 2.0", about_it)  # a figure never changes


def test_modules_whose_library_is_not_installed_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, library in (("wanting", "no_such_library.part"), ("broken", "lowvram.no_such_module")):
        (tmp_path / f"{name}.py").write_text(f"import {library}\n")
    import_unless_lacking("wanting")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        import_unless_lacking("broken")


def test_what_happens_to_foreign_files_is_seen(tmp_path: Path) -> None:
    foreign = Foreign(tmp_path)
    foreign.plant(tmp_path, ("a", "b", "c", "d"), out=tmp_path / "nowhere")
    assert foreign.changed() == []
    (tmp_path / "a").unlink()
    (tmp_path / "b").touch()
    (tmp_path / "c").chmod(0o600)
    assert foreign.changed() == ["the user's a was removed", "the user's b was changed", "the user's c was changed"]


def test_what_differs_is_seen() -> None:
    wanted = {"files": ["a", "b"], "run": {"loss": 1.0, "metrics": [{"step": 1}, {"step": 2}]}}
    assert differences(wanted, wanted) == []
    found = {"files": ["a", ".a.tmp"], "run": {"loss": 2.0, "metrics": [{"step": 1}, {"step": 1}, {"step": 2}]}}
    assert differences(wanted, found) == [
        "missing file b",
        "left over file .a.tmp",
        "/run/loss: 2.0 instead of 1.0",
        "/run/metrics: 3 instead of 2: [(1,), (1,), (2,)]",
    ]


def test_configurations_draw_from_every_group() -> None:
    """Of conf/, but those that stand in OTHERWISE."""
    there = {path.name for path in CONF.iterdir() if path.is_dir() and not path.name.startswith("_")}
    named = {*groups(), *OTHERWISE, "data_sheets"}  # of plan.device
    assert there <= named
    words = " ".join(word for number in range(300) for word in configuration(Random(number)))
    assert [group for group in groups() if f" {group}=" not in words] == []


def test_a_forged_line_has_a_right_checksum(tmp_path: Path) -> None:
    forged = line_of({"step": 1, "loss/train": 0.5})
    (tmp_path / "metrics.jsonl").write_text(forged)
    assert read_lines(tmp_path / "metrics.jsonl").num_damaged == 0  # its checksum is right


def test_mistakes_are_many() -> None:
    assert len(mistakes()) > 100
