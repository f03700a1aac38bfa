"""Rates of some parameters that differ from the optimizer's: by globs of their names, and from layer to layer.

Layer-wise decay: Clark et al., "ELECTRA" (2020), and Bao et al., "BEiT" (2021), for fine-tuning.
"""

from __future__ import annotations

import difflib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from lowvram.config.errors import BadInput, Incompatible, require
from lowvram.config.schema import build_as
from lowvram.core.copies import original
from lowvram.core.layouts import Group, update_in_groups
from lowvram.core.mesh import tell_once
from lowvram.core.probes.layers_above import layers_above
from lowvram.core.rates import RATIO
from lowvram.core.rig import Rig
from lowvram.core.stages import stages_of
from lowvram.core.structure import Structure
from lowvram.core.trainable import ever_trains

KEY = "optimizer.groups"
OWN = ("lr", "weight_decay")  # entries of an optimizer's groups that differ
COMPILED = "_orig_mod."  # in names of a module that torch.compile has wrapped
MOST_SHOWN = 3  # names in a message


@dataclass(frozen=True)
class GroupRates:
    """What a group's parameters have in place of the optimizer's values.

    Args:
        lr: their learning rate, which the schedule multiplies; None: optimizer.lr.
        lr_scale: multiplies it.
        lr_decay: multiplies it once for each layer above the parameter; None: optimizer.layer_decay.
        weight_decay: None: as without a group. With a number, biases and norms decay, too.
    """

    lr: float | None = None
    lr_scale: float = 1.0
    lr_decay: float | None = None
    weight_decay: float | None = None

    def check(self, key: str) -> None:
        """Raise BadInput for a value out of range, whose keys begin with `key`."""
        allowed = "above 0 (weights that should not train: adapter=freeze)"
        for name in ("lr", "lr_scale"):
            value = getattr(self, name)
            require(value is None or 0 < value < math.inf, f"{key}.{name}", value, allowed)
        check_decay(f"{key}.lr_decay", self.lr_decay)
        decay = self.weight_decay
        require(decay is None or 0 <= decay < math.inf, f"{key}.weight_decay", decay, "at least 0")


def check_decay(key: str, value: float | None) -> None:
    allowed = "null (off), or above 0 and at most 1, such as 0.9: the share of the rate from a layer to the one below"
    require(value is None or 0 < value <= 1, key, value, allowed)


def groups_of(values: Mapping[str, Any] | None) -> Mapping[str, GroupRates]:
    """The groups by their globs, in order. Raises BadInput for what no group has, or a value out of range."""
    require(values is None or len(values) > 0, KEY, values, "null, or globs of names with a group of values each")
    groups = dict[str, GroupRates]()
    for glob, of_group in (values or {}).items():
        key, allowed = f"{KEY}.{glob}", "a group of values, such as {weight_decay: 0} or {lr: 1e-4}"
        require(isinstance(of_group, Mapping) and len(of_group) > 0, key, of_group, allowed)
        groups[str(glob)] = build_as(GroupRates, dict(of_group), key)
        groups[str(glob)].check(key)
    return groups


class Rates(NamedTuple):
    """What a parameter has in place of its group's entries."""

    lr: float | None
    lr_scale: float
    weight_decay: float | None


Found = Mapping[Tensor, Rates]  # by parameter of the model


@dataclass(frozen=True)
class RateRules:
    """The fields of an optimizer that give some parameters rates of their own."""

    groups: Mapping[str, GroupRates] = field(default_factory=dict)
    layer_decay: float | None = None

    def around(
        self, make: Callable[[list[nn.Parameter]], Optimizer], rig: Rig, lr: float
    ) -> Callable[[list[nn.Parameter]], Optimizer]:
        """`make`, whose optimizers have these rates.

        Args:
            lr: optimizer.lr.
        """
        found = self.find(rig)

        def make_with_rates(parameters: list[nn.Parameter]) -> Optimizer:
            optimizer = make(parameters)
            check_entries(optimizer, found)
            update_in_groups(optimizer, partial(by_rates, found, lr), OWN)
            return optimizer

        return make_with_rates

    def find(self, rig: Rig) -> Found:
        """Raises BadInput for a glob that no parameter that trains matches, or none is left for."""
        names = names_of(rig.model)
        globs = first_matches(list(self.groups), names, elsewhere(rig.model))
        found = WeakIdKeyDictionary()
        for parameter, of_parameter in names.items():
            group = self.groups.get(globs.get(parameter, ""), GroupRates())
            found[parameter] = self.of(group, rig.structure, of_parameter)
        self.tell({glob: sum(each == glob for each in globs.values()) for glob in self.groups}, found)
        return found

    def of(self, group: GroupRates, known: Structure, names: list[str]) -> Rates:
        scale, decay = group.lr_scale, self.layer_decay if group.lr_decay is None else group.lr_decay
        if decay is not None:
            scale *= decay ** max(layers_above(known, name) for name in names)
        return Rates(group.lr, scale, group.weight_decay)

    def tell(self, counts: Mapping[str, int], found: Found) -> None:
        """Say how many weights each glob has, and how far rates differ."""
        least, *_, most = sorted([1.0, 1.0, *(rates.lr_scale for rates in found.values())])
        matches = [f"{glob} matches {count}" for glob, count in counts.items()]
        scales = [] if least == most else [f"learning rates are multiplied by {least:.3g} to {most:.3g}"]
        tell_once(f"optimizer: of {len(found)} parameters that train {', '.join([*matches, *scales])}")


def names_of(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """All names of each parameter that ever trains: a tied one has several."""
    names = defaultdict[nn.Parameter, list[str]](list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if ever_trains(parameter):
            names[parameter].append(name.replace(COMPILED, ""))
    return names


def elsewhere(model: nn.Module) -> list[str]:
    """The names of parameters that other ranks of a pipeline have."""
    stages = stages_of(model)
    return [] if stages is None else [*stages.elsewhere]


def is_match(glob: str, name: str) -> bool:
    """Whether a glob is that of a parameter, or of a module that has it."""
    return fnmatchcase(name, glob) or fnmatchcase(name, f"{glob}.*")


def first_matches(
    globs: list[str], names: Mapping[nn.Parameter, list[str]], others: list[str]
) -> dict[nn.Parameter, str]:
    """The first glob that matches each parameter. Raises BadInput for one that is the first of none."""
    rest, found, others = dict(names), dict[nn.Parameter, str](), [*others]
    every = [name for of_parameter in names.values() for name in of_parameter] + others
    for glob in globs:
        matches = [each for each, of_parameter in rest.items() if any(is_match(glob, name) for name in of_parameter)]
        others_left = [name for name in others if not is_match(glob, name)]
        if not matches and len(others_left) == len(others):
            raise BadInput(KEY, glob, unmatched(glob, every))
        found |= dict.fromkeys(matches, glob)
        rest, others = {each: rest[each] for each in rest if each not in found}, others_left
    return found


def unmatched(glob: str, names: list[str]) -> str:
    """What a glob must be that is the first of no parameter, with names as examples."""
    if any(is_match(glob, name) for name in names):
        return "before the globs that match the same weights: the first match counts, and none is left for this one"
    words = list(dict.fromkeys(part for name in names for part in (name, *parents(name))))
    deeper = [f"*.{glob}"] if any(is_match(f"*.{glob}", name) for name in names) else []
    near = deeper or difflib.get_close_matches(glob.strip("*."), words, n=2)
    meant = f"; did you mean {' or '.join(near)}?" if near else ""
    step = max(1, len(names) // MOST_SHOWN)
    return f"a glob that matches a weight that trains, such as {', '.join(names[::step][:MOST_SHOWN])}{meant}"


def parents(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def check_entries(optimizer: Optimizer, found: Found) -> None:
    """Raises Incompatible if a group of parameters lacks an entry that is to differ."""
    for group in optimizer.param_groups:
        if "weight_decay" not in group and any(
            rates_of(found, each).weight_decay is not None for each in group["params"]
        ):
            raise Incompatible(
                f"{KEY}: {type(optimizer).__name__} has no weight decay: leave weight_decay out of the groups"
            )


def rates_of(found: Found, parameter: Tensor) -> Rates:
    return found[original(parameter)]


def by_rates(found: Found, lr: float, group: Group) -> Iterator[Group]:
    """A group of parameters as several, in each of which all have the same rates.

    Args:
        lr: optimizer.lr, of which the group has a multiple now.
    """
    alike = defaultdict[Rates, list[Tensor]](list)
    for parameter in group["params"]:
        alike[rates_of(found, parameter)].append(parameter)
    factor = group["lr"] / (lr * group.get(RATIO, 1.0))  # of the schedule
    for rates, parameters in alike.items():
        rate = group["lr"] if rates.lr is None else rates.lr * factor
        decay = {} if rates.weight_decay is None else {"weight_decay": rates.weight_decay}
        yield {**group, "params": parameters, "lr": rate * rates.lr_scale, **decay}
