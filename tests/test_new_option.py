"""An option that nobody has heard of, that of docs/adding_a_knob.md as the page has it: one class and one YAML, and
every law holds over it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir

from lowvram import api
from lowvram.config import registry
from lowvram.config.compose import plain
from lowvram.config.defaults import CONF, ROOT
from lowvram.config.errors import BadInput
from lowvram.config.identity import register_resolvers
from lowvram.config.settings import settings
from lowvram.core.fact import Fact
from lowvram.core.knob import Knob
from lowvram.knobs import ckpt
from lowvram.knobs.ckpt import every
from scripts.pages.pairs import all_pairs, covering_rows
from tests import laboratory
from tests.laboratory import KNOBS, MODELS, OPTIONS, PROBLEMS, WITH_DROPOUT
from tests.test_laws import comparable, error_of, keeps_the_names, keeps_the_numbers, saved_share
from tests.test_laws_of_pairs import train_together, unshown, why_not

pytestmark = pytest.mark.usefixtures("compiled_quickly", "same_process_afterwards")

PAGE = (ROOT / "docs" / "adding_a_knob.md").read_text()
CLASS, TEST = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(YAML,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
GROUP, NAME = PAIR = ("ckpt", "first_half")
READ_ONCE = (
    registry.neutral_options,
    registry.options_of,
    registry.ready_options,
    registry.all_options,
    registry.knob_of,
)


def written(source: str) -> type[Knob]:
    """The page's class, as if it stood at the end of knobs/ckpt/every.py."""
    names: dict[str, Any] = dict(vars(every))
    exec(source, names)
    return names["RecomputeFirst"]


@pytest.fixture
def knob(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Knob]:
    """It, and a house that has it: the class in the module of its group, the YAML in the folder of its group."""
    monkeypatch.setattr(ckpt, "RecomputeFirst", written(CLASS), raising=False)
    conf = Path(shutil.copytree(CONF, tmp_path / "conf"))
    (conf / GROUP / f"{NAME}.yaml").write_text(YAML)
    monkeypatch.setattr(registry, "CONF", conf)
    for read in READ_ONCE:
        read.cache_clear()
    monkeypatch.setitem(KNOBS, PAIR, registry.knob_of(PAIR))
    monkeypatch.setitem(OPTIONS, GROUP, registry.options_of(GROUP))
    yield KNOBS[PAIR]
    for read in READ_ONCE:
        read.cache_clear()


def test_hydra_finds_it_in_any_folder(knob: Knob, tmp_path: Path) -> None:
    register_resolvers()
    (tmp_path / "mine" / GROUP).mkdir(parents=True)
    (tmp_path / "mine" / GROUP / "my_half.yaml").write_text(YAML.replace("0.5", "0.25"))
    with initialize_config_dir(str(CONF), version_base="1.3"):
        words = [f"hydra.searchpath=[file://{tmp_path / 'mine'}]", f"{GROUP}=my_half"]
        config = compose("config", words, return_hydra_config=True)
    found = settings(plain(config)).groups[GROUP]
    assert type(found) is type(knob)
    assert vars(found) == {"share": 0.25}


def test_a_program_names_it_as_any_other(knob: Knob) -> None:
    assert api.knob(f"{GROUP}={NAME}") == knob
    assert (GROUP, NAME) in registry.all_options()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_law_1(knob: Knob, problem: str, dtype: torch.dtype) -> None:
    assert problem in comparable(knob)
    assert keeps_the_numbers(knob, error_of(GROUP, knob, problem, dtype), problem, dtype)


@pytest.mark.parametrize("problem", MODELS)
def test_laws_2_to_4(knob: Knob, problem: str) -> None:
    """Every assembly holds it to law 3."""
    assert keeps_the_names(GROUP, knob, problem)
    assert saved_share(GROUP, knob, problem) > 0


def rows(is_compiled: bool) -> list[frozenset[tuple[str, str]]]:
    """Whole configurations that hold it with every other option that it can have; those that take a compiler apart."""
    pairs = {pair for pair in all_pairs(KNOBS) if PAIR in pair and not why_not(pair)}
    compiled = {pair for pair in pairs if any(Fact.C_COMPILER in KNOBS[option].needs() for option in pair)}
    found = covering_rows(compiled if is_compiled else pairs - compiled, why_not)
    assert found
    return found


@pytest.mark.usefixtures("knob")
def test_law_5() -> None:
    assert unshown(KNOBS) == set()
    assert why_not(frozenset({PAIR, ("compile", "torchscript")}))
    for row in rows(is_compiled=False):
        train_together(row, "transformer")


@pytest.mark.slow
@pytest.mark.usefixtures("knob")
def test_law_5_with_a_compiler() -> None:
    for problem in WITH_DROPOUT:
        for row in rows(is_compiled=True):
            train_together(row, problem)


def test_the_test_of_the_page_holds(knob: Knob) -> None:
    names: dict[str, Any] = {**vars(laboratory), "pytest": pytest, "BadInput": BadInput, "RecomputeFirst": type(knob)}
    exec(TEST, names)
    names["test_the_first_share_is_recomputed"]()
    for share in names["test_a_share_out_of_range_is_refused"].pytestmark[0].args[1]:
        names["test_a_share_out_of_range_is_refused"](share)


def test_what_it_would_claim_wrongly_is_found() -> None:
    liar = written(CLASS.replace("Kind.ACTIVATIONS", "Kind.GRADIENTS"))()
    assert saved_share(GROUP, liar, "transformer") <= 0
    other = written(CLASS.replace("recompute(block)", "block.forward = lambda x, inner=block.forward: 2 * inner(x)"))()
    error = error_of(GROUP, other, "transformer", torch.float32)
    assert not keeps_the_numbers(other, error, "transformer", torch.float32)
