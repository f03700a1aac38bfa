"""The sections of what makes another model, or another file, of a trained one: `export.*`, `prune.*` and `grow.*`.
Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from lowvram.config.errors import require

# Modes that make another model from that of a folder, the value `run` of the mode's section. They train nothing.
TRANSFORMS = ("prune", "grow")


def is_transform(choices: Mapping[str, str]) -> bool:
    """Whether a point makes another model from a trained one."""
    return choices["mode"] in TRANSFORMS


class ExportFormat(Enum):
    """How the trained model is written. The names are what a user types."""

    safetensors = "the weights"
    torch_export = "a graph of torch's operators with the weights"
    onnx = "a graph of ONNX's operators with the weights"
    int8 = "weights of linear layers in 8 bits"
    int8_dynamic = "weights of linear layers, and their inputs, in 8 bits"
    int4 = "weights of linear layers in 4 bits"
    pt2e = "a graph whose linear layers and convolutions multiply in 8 bits"


class ExportedWeights(Enum):
    """Which weights are written. The names are what a user types."""

    last = "those of the last step"
    best = "those of the best evaluation, by snapshot.best"
    ema = "averages of the last step's, by ema"


@dataclass(frozen=True)
class ExportSettings:
    """`export.*`"""

    merge: bool
    format: ExportFormat
    of: ExportedWeights = ExportedWeights.last


class ImportanceKind(Enum):
    """How `mode=prune` ranks the units of a width. The names are what a user types."""

    magnitude = "the norm of the weights that write and read the unit"
    wanda = "the weights that read it, times the norm of its activations (Sun et al., 2023)"
    taylor = "by how much the loss changes without it, to first order (Molchanov et al., 2019)"


@dataclass(frozen=True)
class PruneSettings:
    """`prune.*`"""

    run: str | None
    ratio: float
    importance: ImportanceKind
    batches: int
    round_to: int

    def __post_init__(self) -> None:
        allowed = "at least 0 and less than 1: the share of each width that leaves"
        require(0 <= self.ratio < 1, "prune.ratio", self.ratio, allowed)
        require(self.batches >= 1, "prune.batches", self.batches, "at least 1")
        require(self.round_to >= 1, "prune.round_to", self.round_to, "at least 1 (any width)")


class GrowthKind(Enum):
    """Which blocks `mode=grow` copies, and where to. The names are what a user types."""

    stack = "all of them, in order, after the last one (Gong et al., 2019)"
    interleave = "each, after itself"
    identity = "each, after itself, its last layers zero, so that it changes nothing yet (Wu et al., 2024)"


@dataclass(frozen=True)
class GrowSettings:
    """`grow.*`"""

    run: str | None
    factor: int
    how: GrowthKind

    def __post_init__(self) -> None:
        require(self.factor >= 2, "grow.factor", self.factor, "at least 2")
