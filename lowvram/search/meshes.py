"""The meshes over which a search may spread a point: options of `sharding`, each with the values that make the mesh."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

from omegaconf import DictConfig

from lowvram.config.errors import BadInput, require
from lowvram.config.registry import knob_of, node_of, ready_options
from lowvram.config.schema import build
from lowvram.config.settings import Settings
from lowvram.core.fact import Fact, ModelFact
from lowvram.core.knob import Knob, Neutral, Stage, row_shape
from lowvram.planning.estimate import PlanDevice
from lowvram.search.space import Option, changed_values

SHARDING, ACCUM = "sharding", "accum"
MOST_NUMBERS = 3  # of parts that are tried with a pipeline: the smallest that it can have


class Schedule(NamedTuple):
    """An order of parts that is tried with a pipeline."""

    values: Mapping[str, Any]  # of sharding=pipeline
    stages: int = 1  # of each rank
    copies: tuple[str, ...] = ("zero1", "fsdp")  # what several pipelines may do with those of a stage


SCHEDULES = (
    Schedule({}),
    Schedule({"schedule": "interleaved", "stages": 2}, 2),
    Schedule({"schedule": "zero_bubble"}, copies=("zero1",)),  # with whole layers alone
)


class Mesh(NamedTuple):
    """A mesh, as it is typed."""

    option: str  # of sharding
    values: Mapping[str, Any]  # of that option
    accum: str | None = None  # the option of accum that it needs; None: any

    @property
    def words(self) -> str:
        """What stands behind "sharding=", and the words that follow."""
        values = [f"{SHARDING}.{name}={str(value).lower()}" for name, value in self.values.items()]
        return " ".join([self.option, *values, *([] if self.accum is None else [f"{ACCUM}={self.accum}"])])

    def knobs(self, typed: Mapping[str, Any]) -> dict[str, Knob]:
        """By group: of sharding, and of accum if it needs an option of that.

        Args:
            typed: values that the user has typed. Raises BadInput if the mesh can't have them.
        """
        node = node_of(SHARDING, self.option)
        for name, value in typed.items():
            allowed = f"{self.values.get(name)} with {SHARDING}={self.words}"
            require(self.values.get(name, value) == value, f"{SHARDING}.{name}", value, allowed)
            require(name in node, f"{SHARDING}.{name}", value, f"left out with {SHARDING}={self.option}")
        found = {SHARDING: build(DictConfig({**node, **typed, **self.values}), SHARDING)}
        return found if self.accum is None else found | {ACCUM: knob_of((ACCUM, self.accum))}

    @property
    def choices(self) -> dict[str, str]:
        accum = {} if self.accum is None else {ACCUM: self.accum}
        return {SHARDING: self.option, **accum}


@final
@dataclass(frozen=True)
class Together(Neutral):
    """What several knobs need and break, without their effect."""

    knobs: tuple[Knob, ...]

    stage = Stage.PROCESS

    def needs(self) -> frozenset[Fact | ModelFact]:
        return frozenset[Fact | ModelFact]().union(*(knob.needs() for knob in self.knobs))

    def breaks(self) -> frozenset[Fact | ModelFact]:
        return frozenset[Fact | ModelFact]().union(*(knob.breaks() for knob in self.knobs))


@final
@dataclass(frozen=True)
class Meshes:
    """Those of a search.

    Args:
        knobs: of each mesh by its words, by group.
        choices: the options that these knobs are.
    """

    knobs: Mapping[str, Mapping[str, Knob]]
    choices: Mapping[str, Mapping[str, str]]

    def variants(self) -> dict[str, Knob]:
        """Of each mesh by its words what it needs and breaks."""
        return {words: Together(tuple(knobs.values())) for words, knobs in self.knobs.items()}

    def spread(self, words: str, plan_device: PlanDevice) -> PlanDevice:
        """The device with its ranks laid out so. Raises BadInput where their number doesn't divide."""
        return replace(plan_device, row=row_shape(self.knobs[words].values(), plan_device.num_ranks))

    def clashing(self, accum: Mapping[str, Knob], in_use: str) -> Iterator[tuple[Option, Option]]:
        """The pairs of a mesh that needs an option of accum, and another one than that in use."""
        for words, knobs in self.knobs.items():
            if ACCUM in knobs:
                yield from (((SHARDING, words), (ACCUM, name)) for name in accum if name != in_use)


def meshes_of(
    settings: Settings, choices: Mapping[str, str], pinned: Collection[str]
) -> tuple[Meshes, dict[Option, str]]:
    """The meshes of `devices` ranks, and the reasons why others aren't tried.

    Args:
        pinned: the groups whose option the user has typed.
    """
    in_use, num_parts = settings.groups[SHARDING], settings.groups[ACCUM].parts
    require(in_use.ranks == "auto", f"{SHARDING}.ranks", in_use.ranks, "auto with mode=search, which takes devices")
    typed = changed_values(SHARDING, choices[SHARDING], in_use)
    parts = {knob_of((ACCUM, name)).parts: name for name in ready_options(ACCUM) if name != "auto"}
    found, refused = dict[str, Mesh](), dict[Option, str]()
    for mesh in every_mesh(settings.root.devices or 1, [num_parts] if ACCUM in pinned else sorted(parts)):
        if mesh.option == choices[SHARDING] or SHARDING not in pinned:
            needs_accum = mesh.accum is not None and ACCUM not in pinned
            mesh = mesh._replace(accum=parts[int(mesh.accum or 1)] if needs_accum else None)
            found[mesh.words] = mesh
    knobs: dict[str, Mapping[str, Knob]] = {}
    for words, mesh in found.items():
        try:
            knobs[words] = mesh.knobs(typed)
        except BadInput as error:
            refused[SHARDING, words] = str(error)
    return Meshes(knobs, {words: mesh.choices for words, mesh in found.items()}), refused


def every_mesh(num_ranks: int, parts: list[int]) -> Iterator[Mesh]:
    """The meshes of so many ranks; `accum` holds the number of parts that one needs.

    Args:
        parts: numbers of parts that a batch can have.
    """
    yield from (Mesh("ddp", {}), Mesh("zero1", {}), Mesh("fsdp", {}), Mesh("fsdp", {"reshard_after_forward": False}))
    shares = [number for number in range(2, num_ranks + 1) if num_ranks % number == 0]
    for share in shares:
        is_whole = share == num_ranks
        if not is_whole:
            yield Mesh("fsdp", {"replicate": share})
        for more in ({}, {"sequence": True}):
            if not is_whole:
                yield Mesh("zero1", {"tensor": share, **more})
                yield Mesh("fsdp", {"tensor": share, **more})
            yield Mesh("tensor", more if is_whole else {"tensor": share, **more})
        yield Mesh("context", {} if is_whole else {"context": share})
        yield Mesh("zero1", {"context": share})
        yield Mesh("fsdp", {"context": share})
    for num_stages in shares:
        for tensor in (1, *shares):
            if num_ranks % (num_stages * tensor) == 0:
                yield from pipelines(num_stages, tensor, num_ranks, parts)


def pipelines(num_stages: int, tensor: int, num_ranks: int, parts: list[int]) -> Iterator[Mesh]:
    """Pipelines of so many ranks, whose layers are split over `tensor` ranks each."""
    is_whole = num_stages * tensor == num_ranks
    values = {} if is_whole else {"pipeline": num_stages}
    values |= {} if tensor == 1 else {"tensor": tensor}
    for schedule in SCHEDULES if tensor == 1 else SCHEDULES[:-1]:
        enough = [number for number in parts if number >= num_stages * schedule.stages]
        for number in enough[:MOST_NUMBERS]:
            yield Mesh("pipeline", {**values, **schedule.values}, str(number))
            for copies in () if is_whole else schedule.copies:
                yield Mesh("pipeline", {**values, **schedule.values, "copies": copies}, str(number))
