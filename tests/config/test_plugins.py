"""What an installed package may bring, and what it may not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from lowvram.config import plugins
from lowvram.config.code_names import code_in
from lowvram.config.defaults import CONF
from lowvram.config.errors import BadInput, Refused
from lowvram.config.identity import register_resolvers
from lowvram.config.registry import node_of, options_of
from lowvram.config.schema import build
from tests.plugged import PACKAGE, install, known_nowhere_afterwards


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on Python's path, for packages; afterwards nothing knows them."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    with known_nowhere_afterwards():
        yield tmp_path / "site"


def test_without_one_there_is_nothing() -> None:
    assert plugins.plugins() == ()
    assert plugins.own_groups() == {}


def test_its_options_are_found_and_its_classes_built(site: Path) -> None:
    folder = install(site)
    assert plugins.plugins() == (plugins.Plugin(PACKAGE, "1.2", folder / "conf"),)
    assert list(plugins.own_groups()) == ["garbage"]
    assert {"lion", "adamw"} <= set(options_of("optimizer"))
    assert options_of("garbage") == ["none", "steps"]
    lion = build(node_of("optimizer", "lion"), "optimizer")
    assert (type(lion).__module__, lion.beta2) == (f"{PACKAGE}.lion", 0.99)
    assert plugins.versions_of({"optimizer": node_of("optimizer", "lion"), "seed": 0}) == {PACKAGE: "1.2"}
    assert plugins.is_unused("garbage", {"_target_": f"{PACKAGE}.garbage.WhenPythonLikes"})
    assert not plugins.is_unused("garbage", {"_target_": f"{PACKAGE}.garbage.EverySteps", "every": 10})
    assert not plugins.is_unused("optimizer", None)


def test_hydra_finds_it_in_any_folder_too(site: Path) -> None:
    install(site)
    plugins.offer()
    register_resolvers()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        plain, chosen = compose("config"), compose("config", ["garbage=steps", "optimizer=lion"])
    assert plain.garbage._target_ == f"{PACKAGE}.garbage.WhenPythonLikes"
    assert (chosen.garbage.every, chosen.optimizer.lr) == (10, 1e-4)


def test_code_of_strangers_stays_refused(site: Path) -> None:
    """A package on the path that isn't installed as a plug-in, and functions of one that is."""
    install(site)
    install(site, "stranger")
    (site / "stranger-1.2.dist-info" / "entry_points.txt").write_text(f"[other.program]\nx = {PACKAGE}\n")
    for target in ("stranger.garbage.EverySteps", f"{PACKAGE}_too.EverySteps", PACKAGE, "os.system"):
        with pytest.raises(BadInput, match=r"must be a class inside lowvram or an installed plug-in"):
            build(DictConfig({"_target_": target}), "garbage")
    for target in (f"{PACKAGE}.garbage.gc.collect", f"{PACKAGE}.lion.require", f"{PACKAGE}.garbage.count"):
        with pytest.raises(BadInput, match=r"must be (a dataclass|the dotted name of a class) of tidy_lion"):
            build(DictConfig({"_target_": target}), "garbage")


def test_a_folder_of_others_that_names_its_code_is_asked_about(site: Path) -> None:
    install(site)
    assert code_in(["garbage=steps", "garbage.every=3"]) == {}
    assert code_in(["garbage=/tmp/theirs"]) == {"garbage": ["/tmp/theirs"]}
    assert code_in([f"garbage._target_={PACKAGE}.garbage.EverySteps"])


def test_an_option_with_the_name_of_another_is_refused(site: Path) -> None:
    folder = install(site)
    (folder / "conf" / "optimizer" / "lion.yaml").rename(folder / "conf" / "optimizer" / "sgd.yaml")
    with pytest.raises(Refused, match=r"tidy_lion: its conf/optimizer/sgd.yaml must have another name: lowvram has"):
        plugins.offer()


def test_a_group_without_a_neutral_option_is_refused(site: Path) -> None:
    folder = install(site)
    (folder / "conf" / "garbage" / "none.yaml").unlink()
    with pytest.raises(Refused, match=r"tidy_lion: its group garbage must have a conf/garbage/none.yaml"):
        plugins.offer()


def test_an_entry_point_whose_package_is_gone_is_left_out(site: Path) -> None:
    install(site, "gone", source=None)
    assert plugins.plugins() == ()
