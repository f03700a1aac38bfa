"""The base of configurations from whose trained models others are made: a smaller or a deeper one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

from torch import nn

from lowvram.config.transforms import GrowthKind
from lowvram.data.spec import DataSpec
from lowvram.models.growth import Grown
from lowvram.models.widths import Pruned


class Trained(NamedTuple):
    """A trained model, and what it reads."""

    model: nn.Module
    spec: DataSpec
    inputs: Callable[[], Any]  # those of a few samples, on the CPU


class Remade(ABC):
    """The configuration of a model that can start with trained weights, and be made with other sizes."""

    @abstractmethod
    def trained_folder(self) -> Path | None:
        """The folder of the trained weights that the model starts with; None if there are none."""

    @abstractmethod
    def weight_files(self) -> list[Path]:
        """The files with those weights."""

    @abstractmethod
    def written_in(self, folder: Path) -> Self:
        """The configuration of the trained model that `save` has written there."""

    @abstractmethod
    def smaller(self, trained: Trained, ratio: float, multiple: int) -> Pruned:
        """How the model becomes smaller inside its blocks.

        Args:
            trained: isn't changed.
            ratio: the share of each width that leaves.
            multiple: of which those widths stay multiples that aren't counted in heads.

        Raises:
            BadInput: the model can't be pruned.
        """

    @abstractmethod
    def deeper(self, trained: Trained, factor: int, how: GrowthKind) -> Grown:
        """How the model gets more blocks.

        Args:
            trained: isn't changed.
            factor: how many times each block is there that can be copied.

        Raises:
            BadInput: the model can't be grown, or not so.
        """

    @abstractmethod
    def changes(self, new: Any) -> str:
        """The sizes that another configuration has instead of this one's; empty if there are none."""
