"""How a trained model of transformers is made with other sizes: deeper (`mode=grow`), or smaller inside its blocks
(`mode=prune`). Which of its configuration's fields say so is tried on the model itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any, Self

from torch import nn

from lowvram.config.errors import BadInput, require
from lowvram.config.texts import first_line
from lowvram.config.transforms import GrowthKind
from lowvram.core.free_memory import free_host_bytes
from lowvram.core.probes.blocks import find_blocks
from lowvram.data.spec import DataSpec
from lowvram.models import hf_depths
from lowvram.models.growth import Grown
from lowvram.models.hf_heads import Head
from lowvram.models.hf_sizes import shapes_of
from lowvram.models.hf_widths import Check, Trials
from lowvram.models.remade import Remade, Trained
from lowvram.models.third_party import ForeignModel
from lowvram.models.widths import Pruned
from lowvram.results.row import size_text


class HfRemade(ForeignModel, Remade):
    """What of a model of transformers is needed to make it with other sizes, and how that is done."""

    name: str

    @abstractmethod
    def chosen_head(self) -> Head: ...

    @abstractmethod
    def has_trained_head(self) -> bool:
        """Whether the pretrained weights include this head."""

    @abstractmethod
    def model_class(self) -> Any:
        """The model's class in transformers."""

    @abstractmethod
    def config_for(self, spec: DataSpec) -> Any:
        """The configuration for these data."""

    @abstractmethod
    def make(self, spec: DataSpec) -> nn.Module:
        """The model for these data, with random values."""

    @abstractmethod
    def with_sizes(self, sizes: Mapping[str, int]) -> Self:
        """The same with other values in its configuration."""

    def shapes_with(self, sizes: Mapping[str, int], spec: DataSpec) -> dict[str, tuple[int, ...]] | None:
        """The shapes of the model with other values in its configuration, which is read again as if it had been saved:
        its class checks then what it allows. None if there is no such model."""
        try:
            config = self.with_sizes(sizes).config_for(spec)
            return shapes_of(self.model_class(), type(config).from_dict(config.to_dict()))
        except Exception:
            return None

    def checked_blocks(self, trained: Trained, what: str) -> tuple[str, ...]:
        """The names of the blocks, of a model that was trained with its head.

        Args:
            what: what is done to them.
        """
        head = self.chosen_head().name
        blocks = find_blocks(trained.model, self.call, trained.inputs(), self.blocks).blocks
        require(self.has_trained_head(), "model.head", head, f"the one that the model was trained with, to be {what}")
        require(bool(blocks), "model.blocks", self.blocks, f"the class of the blocks that are {what}: none were found")
        return blocks

    def check_proof(self, num_bytes: int) -> None:
        """Raises BadInput if the host hasn't so much memory for a check in fp64."""
        free = free_host_bytes()
        allowed = f"a model small enough for the host's free memory, {size_text(free)}: to check in 64-bit floats"
        takes = f"that both models compute the same takes {size_text(num_bytes)}"
        require(num_bytes <= free, "model.name", self.name, f"{allowed} {takes}")

    def deeper(self, trained: Trained, factor: int, how: GrowthKind) -> Grown:
        self.checked_blocks(trained, "copied")
        model, spec, inputs = trained
        values = self.config_for(spec).to_dict()
        depth = hf_depths.find_depth(model, values, lambda sizes: self.shapes_with(sizes, spec), factor, how)
        config, names = self.with_sizes(depth.sizes), model.state_dict().keys()
        is_deeper = bool(depth.lists) and hf_depths.runs_all(self.call, model, config.make(spec), inputs(), depth.lists)
        stay = "; ".join(depth.left) or "blocks that a pass doesn't run if there are more"
        allowed = f"a model whose configuration says how many blocks it has; here stay {stay}"
        require(is_deeper, "model.name", self.name, allowed)
        if how is not GrowthKind.identity:
            return Grown(config, depth.tensors(names, {}), depth.left)
        self.check_proof(hf_depths.needed_bytes(model, depth.tensors(names, {})))
        try:
            last = hf_depths.proven_last_layers(self.call, model, lambda: config.make(spec), inputs(), depth)
        except (hf_depths.NotIdle, LookupError, RuntimeError, TypeError, ValueError) as error:
            is_known = isinstance(error, hf_depths.NotIdle)
            why = error if is_known else f"it can't be checked in 64-bit floats ({first_line(error)})"
            raise BadInput("grow.how", how.name, f"stack or interleave for this model: {why}") from None
        return Grown(config, depth.tensors(names, last), depth.left)

    def smaller(self, trained: Trained, ratio: float, multiple: int) -> Pruned:
        blocks = self.checked_blocks(trained, "pruned")
        model, spec, inputs = trained
        trials = Trials(model, self.config_for(spec), lambda sizes: self.shapes_with(sizes, spec), blocks)
        heads, mlps = trials.heads(ratio), trials.mlps(ratio, multiple)
        same = [each for each in [*heads.found, *mlps.found] if not each.is_smaller]
        fewer = [each for each in [*heads.found, *mlps.found] if each.is_smaller]
        check = Check(model, lambda sizes: self.with_sizes(sizes).make(spec), self.call, inputs)
        self.check_proof(check.needed_bytes(fewer))
        sure = check.proven(fewer)
        left = [
            *heads.left,
            *mlps.left,
            *sure.left,
            *(f"{each}: none leaves of {each.num_units} in each" for each in same),
        ]
        allowed = f"a model inside whose blocks something can leave; here stay {'; '.join(left)}"
        require(bool(sure.found or same), "model.name", self.name, allowed)
        holds = partial(check.holds, sure.sizes, sure.widths)
        return Pruned(self.with_sizes(sure.sizes), sure.widths, sure.numbers, left, holds)
