"""What the options of `sharding` share that can split layers over the ranks of a row.

Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism" (2019).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

import torch

from lowvram.compat.torch_fake import is_fake
from lowvram.config.errors import Incompatible, require
from lowvram.core.fact import Fact, ModelFact
from lowvram.core.layers import has_own_forward
from lowvram.core.mesh import Ranks, row_ranks, tensor_mesh
from lowvram.core.probes.draws import NO_RANDOMNESS
from lowvram.core.probes.splits import How, Split
from lowvram.core.probes.weights import REAL_WEIGHTS, SEPARATE_MEMORY
from lowvram.core.probes.writes import STEADY_WEIGHTS
from lowvram.core.rig import Part, Rig, Run
from lowvram.core.states import digest
from lowvram.core.structure import BLOCKS
from lowvram.knobs.sharding.base import DataParallel
from lowvram.knobs.sharding.find_splits import FindSplits, is_linear
from lowvram.knobs.sharding.row import MeshRow
from lowvram.knobs.sharding.split_layers import split, split_dim

NEEDS = frozenset({Fact.EAGER, BLOCKS, NO_RANDOMNESS, REAL_WEIGHTS, SEPARATE_MEMORY, STEADY_WEIGHTS})
BREAKS = frozenset({Fact.WHOLE_PARAMS, Fact.WHOLE_UPDATES, Fact.PLAIN_PRODUCTS, Fact.COMPILED})


@dataclass(frozen=True)
class InRows(DataParallel):
    """Options under which the linear layers of each block may be split over the ranks of a row, which compute the same
    samples: each has some of the heads of attention, and some of the features between the layers of an MLP. Twice in a
    block, and twice more in its backward pass, they add up what they have computed. Rows share out the batch.

    Args:
        tensor: how many ranks a row has; None: all are one row.
        splits: which layers are split, and how, by patterns of their dotted names; None: as is found.
    """

    tensor: int | None = 1
    splits: dict[str, How] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.tensor is None or self.tensor > 0, "sharding.tensor", self.tensor, "null, or at least 1")

    @property
    def splits_layers(self) -> bool:
        return self.tensor != 1

    def needs(self) -> frozenset[Fact | ModelFact]:
        return self.needs_always | (NEEDS if self.splits_layers else frozenset())

    def breaks(self) -> frozenset[Fact | ModelFact]:
        return self.breaks_always | (BREAKS if self.splits_layers else frozenset())

    def ranks_in_row(self, num_ranks: int) -> int:
        number = num_ranks if self.tensor is None else self.tensor
        require(num_ranks % number == 0, "sharding.tensor", number, f"a number that divides the {num_ranks} ranks")
        return number

    def partition(self, rig: Rig) -> None:
        if (mesh := tensor_mesh()) is None:
            return
        known, row = rig.structure, MeshRow(mesh)
        splits = known.get(FindSplits(row.size, tuple((self.splits or {}).items())))
        for what, number in splits.units.items():
            check_divides(what, number, row.size)
        for name, each in splits.layers.items():
            check_layer(name, known.model.get_submodule(name), each, row.size)
        split(known.model, splits, row)

    def with_same_samples(self, rig: Rig) -> Rig:
        """The rig, which refuses a first step in which the ranks of a row are given different samples."""
        return rig if (row := row_ranks()) is None else replace(rig, run=SameSamples(rig.run, row))


@final
class SameSamples:
    """Before the first step, has the ranks of a row compare what they are given."""

    def __init__(self, run: Run, row: Ranks) -> None:
        self._run, self._row, self._is_checked = run, row, False

    def __call__(self, rig: Rig, parts: list[Part], total: torch.Tensor) -> torch.Tensor:
        tensors = [tensor for part in parts for tensor in part.tensors()]
        if not (self._is_checked or any(map(is_fake, tensors))):
            self._is_checked = True
            if len({*self._row.gather(tuple(map(digest, tensors)))}) > 1:
                raise Incompatible(
                    "sharding.tensor: ranks that split layers among them were given different samples: give rank r of a"
                    " loop of your own the share r // sharding.tensor"
                )
        return self._run(rig, parts, total)


def check_divides(what: str, number: int, num_ranks: int) -> None:
    """Raises BadInput where a number isn't a multiple of the number of ranks."""
    fitting = ", ".join(str(each) for each in range(1, number + 1) if number % each == 0)
    allowed = f"a number that divides the model's {number} {what}: one of {fitting}"
    require(number % num_ranks == 0, "sharding.tensor", num_ranks, allowed)


def check_layer(name: str, layer: Any, each: Split, num_ranks: int) -> None:
    """Raises Incompatible for a layer that can't be split, or BadInput where its features don't divide."""
    if each.how is not How.summed and not is_linear(layer):
        raise Incompatible(
            f"sharding.tensor splits linear layers, and {name} is a {type(layer).__name__} with these options: leave"
            " the option that makes it one, or choose sharding=fsdp"
        )
    if has_own_forward(layer):
        raise Incompatible(
            f"sharding.tensor would drop the forward pass that the model has put into {name} itself ({name}.forward ="
            " …): make it a class of its own, or choose sharding=fsdp"
        )
    if each.how is How.summed:
        return
    check_divides(f"features of {name}", layer.weight.shape[split_dim(layer, each.how)], num_ranks)
