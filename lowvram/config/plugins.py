"""Plug-ins: installed packages that bring options of groups, or whole groups of knobs. Imports no torch, and no code of
theirs: that is imported as that of any option, by the class that its YAML names.

A package is one by its entry point in the group `lowvram.knobs`, whose value is the package's dotted name. Beside its
modules it has a folder `conf` like ours: conf/GROUP/OPTION.yaml. Only classes inside the package may be named there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from lowvram.config.defaults import CONF, default_options
from lowvram.config.errors import Refused

ENTRY_POINTS = "lowvram.knobs"
NEUTRAL = "none"  # the option of a plug-in's own group that a point has unless the user types another one
PACKAGE = "lowvram"


@final
@dataclass(frozen=True)
class Plugin:
    """An installed package with options."""

    package: str  # its dotted name
    version: str  # of the distribution that it came with
    conf: Path  # its folder of groups

    def files(self) -> list[Path]:
        """The YAMLs of its options."""
        return sorted(self.conf.glob("*/*.yaml"))


@cache
def plugins() -> tuple[Plugin, ...]:
    """Those that are installed, by their names."""
    found = {each.value.partition(":")[0].strip(): each for each in entry_points(group=ENTRY_POINTS)}
    return tuple(
        Plugin(package, each.dist.version if each.dist else "", folder / "conf")
        for package, each in sorted(found.items())
        if (folder := folder_of(package)) is not None
    )


def folder_of(package: str) -> Path | None:
    """Where a package lies; None if it is gone. Only its outermost package is looked for, which imports nothing."""
    outermost, *inner = package.split(".")
    spec = find_spec(outermost)
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    return Path(places[0]).joinpath(*inner) if places else None


def loaded(file: Path) -> DictConfig:
    node = OmegaConf.load(file)
    assert isinstance(node, DictConfig)
    return node


@cache
def own_groups() -> Mapping[str, Plugin]:
    """The groups that plug-ins bring, and which one brings each."""
    ours = default_options()
    return {
        file.parent.name: plugin
        for plugin in reversed(plugins())
        for file in plugin.files()
        if file.stem == NEUTRAL and file.parent.name not in ours
    }


def folders(group: str) -> Iterator[Path]:
    """The plug-ins' folders with options of a group."""
    yield from (plugin.conf / group for plugin in plugins())


def owner(target: str) -> str | None:
    """The package whose code a `_target_` names: ours or a plug-in's; None if it is neither."""
    known = (PACKAGE, *(plugin.package for plugin in plugins()))
    return next((package for package in known if target.startswith(f"{package}.")), None)


def is_unused(group: str, values: Any) -> bool:
    """Whether a group is a plug-in's that does nothing, so that a point is the same as without the plug-in."""
    plugin = own_groups().get(group)
    return plugin is not None and values == OmegaConf.to_container(loaded(plugin.conf / group / f"{NEUTRAL}.yaml"))


def versions_of(config: Mapping[str, Any]) -> dict[str, str]:
    """The versions of the plug-ins whose classes the groups of a configuration name."""
    targets = [str(node.get("_target_")) for node in config.values() if isinstance(node, Mapping)]
    used = {owner(target) for target in targets}
    return {plugin.package: plugin.version for plugin in plugins() if plugin.package in used}


def offer() -> None:
    """Have Hydra find the options, and take the neutral one of each group that is new.

    Raises:
        Refused: an option has the name of another one, or a group has no neutral option.
    """
    store, known = ConfigStore.instance(), {path.relative_to(CONF): PACKAGE for path in CONF.glob("*/*.yaml")}
    for plugin in plugins():
        for file in plugin.files():
            name, group = file.relative_to(plugin.conf), file.parent.name
            if name in known:
                raise Refused(f"{plugin.package}: its conf/{name} must have another name: {known[name]} has this one")
            if group not in default_options() and group not in own_groups():
                raise Refused(f"{plugin.package}: its group {group} must have a conf/{group}/{NEUTRAL}.yaml")
            known[name] = plugin.package
            store.store(group=group, name=file.stem, node=loaded(file), provider=plugin.package)
    if own_groups():
        node = {"defaults": [{f"/{group}": NEUTRAL} for group in own_groups()]}
        store.store(group="plugins", name="installed", node=node, package="_global_", provider=PACKAGE)
