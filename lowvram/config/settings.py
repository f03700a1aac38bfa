"""The root of the configuration: every key that belongs to no group, with its type. Imports no torch.

The values are in conf/config.yaml; these classes say what is allowed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf

from lowvram.config.defaults import default_options
from lowvram.config.errors import BadInput, require
from lowvram.config.plugins import NEUTRAL, own_groups
from lowvram.config.schema import build, build_as, checked_values
from lowvram.config.training import SnapshotSettings, TrainSettings, check_ending
from lowvram.config.transforms import ExportSettings, GrowSettings, PruneSettings

UNITS = {
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}

OTHER_GROUPS = ("model", "task", "data", "loader", "schedule", "mode")  # built from their YAML, too, but no knobs
OURS, PLAIN = LOOPS = ("lowvram", "plain")  # whose training loop a plan is of
BEFORE_BACKWARD, BEFORE_FORWARD, AFTER_STEP = ZERO_GRADS = ("before_backward", "before_forward", "after_step")
CHILD, INLINE = "child", "inline"  # where a point runs
MOST_JOBS = 999
SCORES = ("accuracy", "perplexity", "loss")  # names of figures of an evaluation
PARENT_ONLY = ("logger", "paths", "launcher")  # groups that only the parent uses: see parent_settings.py
HYDRAS = ("hydra", "optional local", "optional plugins")  # entries of the defaults list that are no groups of ours
# In the order in which those of one stage act: as in the defaults list, and then the plug-ins'.
KNOB_GROUPS = tuple(
    group
    for group, option in {**default_options(), **dict.fromkeys(own_groups(), NEUTRAL)}.items()
    if option is not None and group not in (*OTHER_GROUPS, *PARENT_ONLY, *HYDRAS)
)
GROUPS = (*OTHER_GROUPS, *KNOB_GROUPS)


@dataclass(frozen=True)
class EvalSettings:
    """`eval.*`"""

    metrics: list[str] | None

    def __post_init__(self) -> None:
        names = [target.rpartition(".")[2] for target in self.metrics or ()]
        twice = [name for name in names if names.count(name) > 1 or name in SCORES]
        allowed = f"a list of functions with other names than each other's and {', '.join(SCORES)}"
        require(not twice, "eval.metrics", twice, allowed)


@dataclass(frozen=True)
class MeasureSettings:
    """`measure.*`"""

    warmup_steps: int
    steps: int
    max_seconds: float
    largest_tensors: bool
    fidelity: bool
    fidelity_steps: int
    reruns: int

    def __post_init__(self) -> None:
        require(self.warmup_steps >= 1, "measure.warmup_steps", self.warmup_steps, "at least 1")
        require(self.steps >= 1, "measure.steps", self.steps, "at least 1")
        require(self.max_seconds > 0, "measure.max_seconds", self.max_seconds, "more than 0 seconds")
        require(self.fidelity_steps >= 1, "measure.fidelity_steps", self.fidelity_steps, "at least 1")
        require(0 <= self.reruns <= 2, "measure.reruns", self.reruns, "0, 1 or 2")


@dataclass(frozen=True)
class PlanSettings:
    """`plan.*`"""

    device: str
    host: str | None
    skip: bool
    margin: float | None
    link_bytes_per_s: float | None = None
    loop: str = OURS
    zero_grad: str | None = None

    def __post_init__(self) -> None:
        parse_bytes("plan.host", self.host)
        require(self.loop in LOOPS, "plan.loop", self.loop, f"one of {', '.join(LOOPS)}")
        check_zero_grad("plan.zero_grad", self.zero_grad, self.loop)
        link, allowed = self.link_bytes_per_s, "null (as the device's YAML says) or more than 0, such as 1.25e9"
        require(link is None or 0 < link < math.inf, "plan.link_bytes_per_s", link, allowed)
        allowed = "null or a share from 0 (none) to below 10, such as 0.1"
        require(self.margin is None or 0 <= self.margin < 10, "plan.margin", self.margin, allowed)


def check_zero_grad(key: str, value: str | None, loop: str) -> None:
    """Refuse a place of zero_grad that there isn't, or one of another loop than the plain one."""
    require(value in (None, *ZERO_GRADS), key, value, f"null or one of {', '.join(ZERO_GRADS)}")
    require(
        value is None or loop == PLAIN, key, value, f"null unless the loop is {PLAIN}: lowvram's frees each gradient"
    )


def zero_grad_of(loop: str, value: str | None) -> str | None:
    """Where the loop zeroes gradients; None: it is lowvram's."""
    return None if loop == OURS else value or BEFORE_BACKWARD


@dataclass(frozen=True)
class SearchSettings:
    """`search.*`"""

    groups: list[str] | None
    lossy: bool
    probes: int
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        allowed = "null (no limit) or more than 0 seconds"
        require(self.max_seconds is None or self.max_seconds > 0, "search.max_seconds", self.max_seconds, allowed)
        for name in self.groups or ():
            require(name in KNOB_GROUPS, "search.groups", name, f"a list of some of {', '.join(KNOB_GROUPS)}")
        require(self.groups != [], "search.groups", "[]", "null (the usual ones) or a list of at least one group")
        require(1 <= self.probes <= 12, "search.probes", self.probes, "between 1 and 12")


@dataclass(frozen=True)
class SolveSettings:
    """`solve.*`"""

    key: str | None
    multiple_of: int

    def __post_init__(self) -> None:
        require(self.multiple_of >= 1, "solve.multiple_of", self.multiple_of, "at least 1")


@dataclass(frozen=True)
class RootSettings:
    """The root keys that are plain values."""

    seed: int
    device: str
    vram: str | None
    timeout_s: float | None
    resume: str | None
    name: str | None
    process: str
    callbacks: list[str] | None
    optimized_metric: Any = None  # a path or a list of paths: see cli/objective.py
    trust: str | None = None
    jobs: str = "1"
    devices: int | None = None
    price_per_hour: float | None = None

    def __post_init__(self) -> None:
        allowed = f"null (all that are visible) or a number from 1 to {MOST_JOBS}"
        require(self.devices is None or 1 <= self.devices <= MOST_JOBS, "devices", self.devices, allowed)
        price, allowed = self.price_per_hour, "null (not known) or at least 0, in any currency, such as 0.35"
        require(price is None or 0 <= price < math.inf, "price_per_hour", price, allowed)
        is_number = self.jobs.isdecimal() and 1 <= int(self.jobs) <= MOST_JOBS
        allowed = f"auto, one for each visible device, or a number from 1 to {MOST_JOBS}"
        require(self.jobs == "auto" or is_number, "jobs", self.jobs, allowed)
        require(self.process in (CHILD, INLINE), "process", self.process, f"{CHILD} or {INLINE}")
        require(0 <= self.seed < 2**63, "seed", self.seed, "between 0 and 2**63 - 1")
        allowed = "auto, cpu, cuda or cuda:N, N being the number of a device"
        require(bool(re.fullmatch(r"auto|cpu|cuda(:\d{1,4})?", self.device)), "device", self.device, allowed)
        require(
            self.timeout_s is None or self.timeout_s > 0,
            "timeout_s",
            self.timeout_s,
            "null or more than 0 seconds",
        )
        check_name(self.name)
        parse_bytes("vram", self.vram)

    @property
    def names_card(self) -> bool:
        """Whether `device` says which card, as cuda:1 does."""
        return ":" in self.device


@dataclass(frozen=True)
class Settings:
    """The whole configuration of one point, checked. `groups` holds the object that each group's option names."""

    root: RootSettings
    train: TrainSettings
    eval: EvalSettings
    measure: MeasureSettings
    plan: PlanSettings
    search: SearchSettings
    solve: SolveSettings
    prune: PruneSettings
    grow: GrowSettings
    snapshot: SnapshotSettings
    export: ExportSettings
    groups: dict[str, Any]

    def check_paths(self) -> None:
        """Raise BadInput for a path in a group's values that isn't there."""
        for value in self.groups.values():
            getattr(value, "check_paths", lambda: None)()

    @property
    def vram_bytes(self) -> int | None:
        """The memory that the point may use, or None for all that there is."""
        return parse_bytes("vram", self.root.vram)

    def cost(self, seconds: float, num_devices: int) -> float | None:
        """What so many devices cost for so long, in the user's currency; None if no price is known."""
        price = self.root.price_per_hour
        return None if price is None else price * num_devices * seconds / 3600

    @property
    def num_parts(self) -> int:
        """In how many parts a rank computes its slice of a logical batch."""
        return math.prod(self.groups[group].num_parts() for group in KNOB_GROUPS)

    @property
    def host_bytes(self) -> int | None:
        """The host memory that a plan may take, or None for all that is free."""
        return parse_bytes("plan.host", self.plan.host)


SECTIONS = {
    "train": TrainSettings,
    "eval": EvalSettings,
    "measure": MeasureSettings,
    "plan": PlanSettings,
    "search": SearchSettings,
    "solve": SolveSettings,
    "prune": PruneSettings,
    "grow": GrowSettings,
    "snapshot": SnapshotSettings,
    "export": ExportSettings,
}
ROOT_KEYS = (*RootSettings.__dataclass_fields__, *SECTIONS)


def check_root(config: DictConfig) -> dict[str, Any]:
    """The typed root and its sections; raises BadInput for an unknown key, or if a key or group was removed."""
    known = (*ROOT_KEYS, *GROUPS, *PARENT_ONLY)
    for name in config:
        if name not in (*known, "hydra"):
            raise BadInput(str(name), config[name], f"removed: the root knows {', '.join(known)}")
    for name in known:
        if name not in config.keys():  # noqa: SIM118  # "in config" also denies a key without a value
            what = "config group" if name in (*GROUPS, *PARENT_ONLY) else "root key"
            raise BadInput(name, "~", f"kept: a {what} can't be removed; leave it at its default")
    for name in (*GROUPS, *PARENT_ONLY, *SECTIONS):
        node = MISSING if OmegaConf.is_missing(config, name) else config[name]
        if not isinstance(node, DictConfig):
            raise BadInput(name, node, f"one option of the group {name}, or its keys one by one")
    root = OmegaConf.masked_copy(config, list(RootSettings.__dataclass_fields__))
    built = {"root": build_as(RootSettings, checked_values(root, ""), "")}
    sections = checked_sections(config, SECTIONS)
    check_ending(sections["train"], sections["snapshot"], sections["export"])
    return built | sections


def checked_sections(config: DictConfig, sections: Mapping[str, type]) -> dict[str, Any]:
    """The typed values of some sections, by their classes. Raises BadInput for an unknown key or a wrong value."""
    return {name: build_as(cls, checked_values(config[name], name), name) for name, cls in sections.items()}


def settings(values: dict[str, Any]) -> Settings:
    """The whole configuration, with every group built. Imports the classes that the groups name, and so torch.

    Raises:
        BadInput: a value is wrong.
    """
    config = DictConfig(values)
    return Settings(**check_root(config), groups={group: build(config[group], group) for group in GROUPS})


def is_inline(config: Mapping[str, Any]) -> bool:
    """Whether a point is to run in the process of the program itself."""
    return config["process"] == INLINE


def check_name(name: str | None) -> None:
    """Raise BadInput if a run's name can't be part of a folder's name."""
    allowed = "null or 1 to 100 letters, digits and . _ + @ -, the first a letter or digit: it names a folder"
    require(name is None or bool(re.fullmatch(r"[A-Za-z0-9][\w.+@-]{0,99}", str(name))), "name", name, allowed)


def parse_bytes(key: str, text: str | None) -> int | None:
    """'8GiB' -> 8 * 2**30; '8GB' -> 8 * 10**9; None stays None."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]+)", text.strip())
    num_bytes = float(match[1]) * UNITS.get(match[2], 0) if match else 0
    if not 1 <= num_bytes < 2**60:
        raise BadInput(key, text, f"null or a number above 0 with a unit ({', '.join(UNITS)}), such as 8GiB")
    return int(num_bytes)


def check_batch_size(batch_size: int, parts: int, num_ranks: int) -> None:
    """Raise BadInput unless there is a sample of the logical batch for each part of each rank. All ranks then compute
    equally many parts, and so meet in each, whether the batch divides by them or not."""
    name = f"accum.parts={parts}"
    if num_ranks > 1:
        name = f"{num_ranks * parts} (ranks x accum.parts = {num_ranks} x {parts})"
    allowed = f"at least {name}, a sample for each part: choose fewer parts or ranks, or a larger batch"
    require(batch_size >= num_ranks * parts, "train.batch_size", batch_size, allowed)


CHILDS_OWN = (*ROOT_KEYS, *GROUPS, *PARENT_ONLY)  # the keys that are sent to a child, and that `check_root` expects


def is_plan(choices: Mapping[str, str]) -> bool:
    """Whether a point is only planned."""
    return choices["mode"] == "plan"


def is_search(choices: Mapping[str, str]) -> bool:
    """Whether a point is a search, which runs further points."""
    return choices["mode"] == "search"


def is_solve(choices: Mapping[str, str]) -> bool:
    """Whether the largest value of a key is asked for with which a point fits."""
    return choices["mode"] == "solve"


TEACH = "teach"  # a mode that trains nothing: it asks a teacher
