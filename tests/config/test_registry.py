"""Options and their pairs, as the YAMLs and the facts tell; and few configurations that hold every pair."""

from __future__ import annotations

import re
import sys
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lowvram.compat.torch_modes import TorchDispatchMode
from lowvram.config.identity import ROOT
from lowvram.config.registry import all_options, knob_of, neutral_options, options_of, read_all, ready_options
from lowvram.config.settings import KNOB_GROUPS
from lowvram.core.device import absent_facts
from lowvram.core.fact import Fact
from lowvram.worker.job import import_libraries
from scripts.pages.pairs import all_pairs, covering_rows, label, why_not

ABSENT = absent_facts(torch.device("cpu"))
HERE = [option for option in all_options() if not why_not([option], ABSENT)]


def test_every_group_has_its_neutral_option() -> None:
    assert set(neutral_options()) == set(KNOB_GROUPS)


def test_a_point_has_imported_what_its_knobs_will(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the code of a library would be memory of the point."""
    (tmp_path / "a_library_of_a_knob.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    knobs = {group: SimpleNamespace(libraries=()) for group in KNOB_GROUPS}
    knobs["adapter"] = SimpleNamespace(libraries=("a_library_of_a_knob",))
    import_libraries(SimpleNamespace(groups=knobs))  # pyright: ignore[reportArgumentType]
    assert "a_library_of_a_knob" in sys.modules


def test_knobs_name_all_libraries_that_they_import_late() -> None:
    rooms = (ROOT / "lowvram" / room for room in ("knobs", "compress/sparsity"))
    sources = [path.read_text() for room in rooms for path in room.rglob("*.py")]
    imported = {name for source in sources for name in re.findall(r'import_module\("([^"]+)"\)', source)}
    assert imported == {name for option in all_options() for name in knob_of(option).libraries}
    assert all(option in options_of(group) for group, option in neutral_options().items())
    assert not why_not(neutral_options().items(), ABSENT)


def test_pairs_are_of_different_groups() -> None:
    groups = [len(ready_options(group)) for group in neutral_options()]
    assert len(all_pairs(all_options())) == sum(one * other for one, other in combinations(groups, 2))


def test_rows_hold_every_pair_that_fits_and_none_that_does_not() -> None:
    fitting = {pair for pair in all_pairs(HERE) if not why_not(pair, ABSENT)}
    rows = covering_rows(fitting, lambda row: why_not(row, ABSENT))
    assert set().union(*map(all_pairs, rows)) == fitting
    assert all({group for group, _ in row} == set(neutral_options()) for row in rows)
    assert not any(why_not(row, ABSENT) for row in rows)
    assert len(rows) < len(fitting) / 4


def test_what_fits_into_no_whole_configuration_is_reported() -> None:
    pair = frozenset({("precision", "bf16"), ("ckpt", "every1")})
    with pytest.raises(ValueError, match="precision=bf16 ckpt=every1 fits by itself, but no whole configuration"):
        covering_rows({pair}, lambda row: [] if len(row) < 5 else ["never"])


def test_a_label_has_the_order_of_the_groups() -> None:
    assert label({("accum", "x4"), ("precision", "bf16")}) == "precision=bf16 accum=x4"


def test_the_number_of_ranks_follows_the_options() -> None:
    for option in all_options():
        assert not any(Fact.MANY_RANKS.value in reason for reason in why_not([option], ABSENT)), option


def test_an_option_is_its_yaml() -> None:
    assert knob_of(("accum", "x8")) == knob_of(("accum", "x8"))
    assert vars(knob_of(("accum", "x8"))) == {"parts": 8}


class Nothing(TorchDispatchMode):
    """No operator may run inside it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # pyright: ignore
        raise AssertionError(func)


def test_a_process_that_reads_all_options_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else those that are forked from it could hang, or couldn't use CUDA."""
    knob_of.cache_clear()
    for name in ("is_available", "device_count", "get_device_properties", "_lazy_init"):
        monkeypatch.delattr(torch.cuda, name)
    num_threads = len([*Path("/proc/self/task").iterdir()])
    with Nothing():
        read_all()
    assert len([*Path("/proc/self/task").iterdir()]) == num_threads
    assert knob_of.cache_info().currsize == len(all_options())
    knob_of(("ckpt", "every1"))
    assert knob_of.cache_info().hits == 1
