"""The set-up that planning and running a point have in common: ranks, allocator, data, logical batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch

from lowvram.config.errors import BadInput, require
from lowvram.config.registry import knob_of
from lowvram.config.settings import KNOB_GROUPS, Settings
from lowvram.core.fact import Fact, ModelFact
from lowvram.core.knob import conflicts, row_shape
from lowvram.core.row_shape import RowShape
from lowvram.data.source import Data, resolve_source
from lowvram.knobs.allocator import Allocator
from lowvram.loops.noise_scale import noise_of
from lowvram.loops.skipping import skips_of
from lowvram.loops.user_metrics import user_metrics


class Sharding(Protocol):
    """The part of `sharding` options that is used here."""

    @property
    def ranks(self) -> str: ...

    @property
    def timeout_s(self) -> float: ...

    def needs(self) -> frozenset[Fact | ModelFact]: ...


def wanted_ranks(sharding: Sharding, device: torch.device, names_card: bool, num_devices: int | None = None) -> int:
    """How many ranks a point asks for: with `sharding.ranks=auto` one for each CUDA device, unless `sharding` takes one
    rank or the user named a card.

    Args:
        num_devices: `devices`, which "auto" stands for, where the user has typed it. Raises BadInput for several where
            `sharding` takes one rank.
    """
    if sharding.ranks != "auto":
        return int(sharding.ranks)
    if Fact.ONE_RANK in sharding.needs():
        allowed = "null or 1 with one rank: sharding spreads a point over several, and mode=search finds how"
        require(num_devices in (None, 1), "devices", num_devices, allowed)
        return 1
    if num_devices is not None:
        return num_devices
    return torch.cuda.device_count() if device.type == "cuda" and not names_card else 1


def row_of(settings: Settings, num_ranks: int) -> RowShape:
    """How a point's ranks share out the model. Raises BadInput where they can't be laid out so."""
    return row_shape((settings.groups[group] for group in KNOB_GROUPS), num_ranks)


def check_cards(num_local: int, device: torch.device, names_card: bool) -> None:
    """Check that there is a card for each of several ranks on this machine.

    Args:
        names_card: whether the user named a card, such as device=cuda:1.

    Raises:
        BadInput: there are fewer cards, or the user named one.
    """
    if num_local == 1 or device.type != "cuda":
        return
    num_cards = torch.cuda.device_count()
    allowed = f"at most {num_cards}, the number of visible CUDA devices: each rank takes one"
    require(num_local <= num_cards, "sharding.ranks", str(num_local), allowed)
    allowed = "auto or cuda with several ranks: they take the visible devices in turn (CUDA_VISIBLE_DEVICES)"
    require(not names_card, "device", str(device), allowed)


def can_replace(
    settings: Settings, choices: Mapping[str, str], absent: Mapping[Fact, str], num_ranks: int
) -> Callable[[str, str], bool]:
    """A function of group and option that says whether the option can replace the group's present one, and would make a
    difference, on a device that lacks the facts `absent`."""

    def can_be(group: str, option: str) -> bool:
        groups: dict[str, Any] = settings.groups | {group: knob_of((group, option))}
        knobs = {f"{name}={({**choices, group: option})[name]}": groups[name] for name in KNOB_GROUPS}
        knobs |= {**noise_of(settings.train).knobs(), **skips_of(settings.train).knobs()}
        has_samples = settings.train.batch_size >= num_ranks * replace(settings, groups=groups).num_parts
        helps = Fact.CUDA not in absent or not groups[group].moves_to_host
        return helps and has_samples and not conflicts(knobs, absent)

    return can_be


def acting_allocator(settings: Settings, choices: Mapping[str, str], device: torch.device) -> tuple[str, Allocator]:
    """The option of the group `allocator` that takes effect on `device`, and its name. With `vram` on a CPU it may be
    another than the configured one."""
    allocator: Allocator = settings.groups["allocator"]
    is_capped = settings.vram_bytes is not None and device.type == "cpu"
    return (is_capped and allocator.under_cap()) or (choices["allocator"], allocator)


def open_data(settings: Settings) -> Data:
    """Open the data for the loader: scan them and check them against the rest of the configuration."""
    model = settings.groups["model"]
    return settings.groups["loader"].fit(resolve_source(settings.groups["data"], model).open(settings.root.seed), model)


def check_batch_warmup(settings: Settings, num_ranks: int) -> None:
    """Raises BadInput if the batches of the schedule's batch-size warm-up can't be made."""
    start, batch_size = settings.groups["schedule"].batch_start, settings.train.batch_size
    if start is None:
        return
    of_ranks = f", and at least {num_ranks}, the number of ranks" if num_ranks > 1 else ""
    allowed = f"at most {batch_size} (train.batch_size){of_ranks}"
    require(num_ranks <= start <= batch_size, "schedule.batch_start", start, allowed)
    has_larger_parts = batch_size > num_ranks * settings.num_parts
    allowed = f"a multiple of {num_ranks}, the number of ranks, where each part of train.batch_size has one sample"
    require(start % num_ranks == 0 or has_larger_parts, "schedule.batch_start", start, allowed)
    allowed = "null with this option of loader, whose batches have one size: choose loader=inline or loader=workers"
    require(settings.groups["loader"].takes_any_sizes, "schedule.batch_start", start, allowed)


class LeftToPlan(NamedTuple):
    """What a knob leaves to a plan."""

    group: str
    field: str

    def __str__(self) -> str:
        return f"{self.group}.{self.field}"


def undecided(settings: Settings) -> LeftToPlan | None:
    """What is left to a plan that hasn't been made; None if there is nothing. Raises BadInput if two knobs leave it
    something."""
    found = [LeftToPlan(group, field) for group in KNOB_GROUPS if (field := settings.groups[group].left_to_plan())]
    if len(found) > 1:
        raise BadInput(str(found[1]), None, f"given, as the plan chooses {found[0]}, and can't choose both")
    return found[0] if found else None


def check_decided(settings: Settings, device: torch.device) -> None:
    """Raises BadInput if no plan has chosen what a knob leaves to it."""
    if left := undecided(settings):
        require_budget(left, settings.vram_bytes or device.type == "cuda")
        example = settings.groups[left.group].chosen_value((0, 1))
        allowed = f"given, such as {example}, as no plan has chosen it"
        raise BadInput(str(left), None, f"{allowed} (process=child plans; mode=plan says why it can't)")


def require_budget(left: LeftToPlan, is_known: int | bool | None) -> None:
    """Raises BadInput if there is no budget for which a plan could choose what is left to it."""
    allowed = f"a budget, such as 8GiB, for a plan to choose {left}, unless it is for a card whose memory is known"
    require(bool(is_known), "vram", None, allowed)


def with_steps(settings: Settings, data: Data) -> Settings:
    """The settings, with `train.steps` computed from `train.epochs` if that is given. All batches are full: the last
    may hold the first samples of the next epoch."""
    train = settings.train
    if train.epochs is None:
        return settings
    try:
        steps = settings.groups["schedule"].sizes(train.batch_size).steps_for(train.epochs * len(data.train))
    except TypeError as error:
        raise BadInput("train.epochs", train.epochs, f"null, with train.steps: {error}") from None
    return replace(settings, train=replace(train, steps=steps))


def check_metrics(settings: Settings) -> None:
    """Raise BadInput if the user's metrics can't be imported, or would be given outputs that never exist whole."""
    metrics = settings.eval.metrics or []
    user_metrics(metrics, torch.device("cpu"))
    whole = {Fact.FULL_LOGITS, Fact.WHOLE_SAMPLES}
    breakers = [group for group in KNOB_GROUPS if whole & settings.groups[group].breaks()]
    if metrics and breakers:
        allowed = f"null with this option of {breakers[0]}, under which the model's outputs never exist whole"
        raise BadInput("eval.metrics", metrics, allowed)
