"""What the options of `sharding` share that can split layers over the ranks of a row.

Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism" (2019). Or each
has a run of each sample's tokens (runs.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

import torch

from lowvram.compat.torch_fake import is_fake
from lowvram.config.errors import Incompatible, require
from lowvram.core.fact import Fact, ModelFact
from lowvram.core.layers import has_own_forward
from lowvram.core.mesh import Ranks, all_ranks, ranks_along, row_ranks, tensor_mesh
from lowvram.core.probes.draws import NO_RANDOMNESS
from lowvram.core.probes.splits import How, Split
from lowvram.core.probes.weights import REAL_WEIGHTS, SEPARATE_MEMORY
from lowvram.core.probes.writes import STEADY_WEIGHTS
from lowvram.core.rig import Part, Rig, Run
from lowvram.core.row_shape import CONTEXT, TENSOR, RowShape
from lowvram.core.states import digest
from lowvram.core.structure import BLOCKS, Blocks
from lowvram.knobs.sharding.base import DataParallel
from lowvram.knobs.sharding.find_own_tokens import FindOwnTokens
from lowvram.knobs.sharding.find_runs import NO_TEACHER, FindRuns
from lowvram.knobs.sharding.find_splits import FindSplits, check_divides, is_linear
from lowvram.knobs.sharding.own_tokens import row_of, split_with_own_tokens, with_own_tokens
from lowvram.knobs.sharding.row import MeshRow
from lowvram.knobs.sharding.runs import in_runs
from lowvram.knobs.sharding.runs_row import RunsRow
from lowvram.knobs.sharding.split_layers import split, split_dim

NEEDS = frozenset({Fact.EAGER, Fact.OWN_LINEARS, BLOCKS, NO_RANDOMNESS, REAL_WEIGHTS, SEPARATE_MEMORY, STEADY_WEIGHTS})
OF_RUNS = frozenset({Fact.EAGER, NO_RANDOMNESS, NO_TEACHER})
BREAKS = frozenset({Fact.WHOLE_PARAMS, Fact.WHOLE_UPDATES, Fact.PLAIN_PRODUCTS, Fact.COMPILED})

OF_OWN_TOKENS = OF_RUNS | {Fact.GRADS_AT_UPDATE, Fact.SAME_PARAMS, Fact.WHOLE_CALLS}
BREAKS_SAMPLES = frozenset({Fact.COMPILED, Fact.WHOLE_SAMPLES})


@dataclass(frozen=True)
class InRows(DataParallel):
    """Options under which the linear layers of each block may be split over the ranks of a row, which compute the same
    samples: each has some of the heads of attention, and some of the features between the layers of an MLP. Twice in a
    block, and twice more in its backward pass, they add up what they have computed. With `sequence` each has of that
    sum, and computes outside of these layers, a run of tokens alone. Or each has a run of consecutive
    tokens of each sample and, inside attention, all tokens of some heads. Rows share out the batch.

    Args:
        tensor: how many ranks a row has that split layers; None: all are one row.
        splits: which layers are split, and how, by patterns of their dotted names; None: as is found.
        sequence: whether ranks that split layers share out the tokens of a sample wherever no layer is split.
        context: how many ranks a row has that share out the tokens of a sample; None: all are one row.
        positions: the argument that tells the model at which positions its tokens are; None: as is found.
    """

    tensor: int | None = 1
    splits: dict[str, How] | None = None
    sequence: bool = False
    context: int | None = 1
    positions: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, number in (("sharding.tensor", self.tensor), ("sharding.context", self.context)):
            require(number is None or number > 0, key, number, "null, or at least 1")
        allowed = "1 with sharding.tensor above 1: a row splits layers, or shares out tokens"
        require(not (self.splits_layers and self.splits_samples), "sharding.context", self.context, allowed)
        allowed = "false with sharding.tensor=1, as no layers are split"
        require(self.splits_layers or not self.sequence, "sharding.sequence", self.sequence, allowed)

    @property
    def splits_layers(self) -> bool:
        return self.tensor != 1

    @property
    def splits_samples(self) -> bool:
        return self.context != 1

    def needs(self) -> frozenset[Fact | ModelFact]:
        of_layers = NEEDS if self.splits_layers else frozenset[Fact | ModelFact]()
        of_runs = OF_RUNS if self.splits_samples else frozenset[Fact | ModelFact]()
        return self.needs_always | of_layers | of_runs | (OF_OWN_TOKENS if self.sequence else frozenset())

    def breaks(self) -> frozenset[Fact | ModelFact]:
        of_layers = BREAKS if self.splits_layers else frozenset[Fact | ModelFact]()
        of_samples = BREAKS_SAMPLES if self.splits_samples or self.sequence else frozenset[Fact | ModelFact]()
        return self.breaks_always | of_layers | of_samples

    def row_shape(self, num_ranks: int) -> RowShape:
        tensor, context = (num_ranks if each is None else each for each in (self.tensor, self.context))
        for key, number in (("sharding.tensor", tensor), ("sharding.context", context)):
            require(num_ranks % number == 0, key, number, f"a number that divides the {num_ranks} ranks")
        return RowShape(context=context, tensor=tensor, own_tokens=self.sequence and tensor > 1)

    def partition(self, rig: Rig) -> None:
        if (ranks := ranks_along(CONTEXT)) is not None:
            rig.structure.get(FindRuns(ranks.size, self.positions))  # raises where the model can't be had so
        if (mesh := tensor_mesh()) is None:
            return
        known, row = rig.structure, MeshRow(mesh)
        how = FindSplits(row.size, tuple((self.splits or {}).items()))
        splits = known.get(how)
        for what, number in splits.units.items():
            check_divides(what, number, row.size)
        for name, each in splits.layers.items():
            check_layer(name, known.model.get_submodule(name), each, row.size)
        if self.sequence:
            way = known.get(FindOwnTokens(how))  # raises where the model can't be had so
            split_with_own_tokens(known.model, splits, RunsRow(row, way), known.get(Blocks()).blocks)
        else:
            split(known.model, splits, row)

    def in_rows(self, rig: Rig) -> Rig:
        """The rig, which computes this rank's run of tokens where there are such, and refuses a first step in which the
        ranks of a row are given different samples."""
        if (ranks := ranks_along(CONTEXT)) is not None:
            rig = in_runs(rig, ranks, rig.structure.get(FindRuns(ranks.size, self.positions)))
        if (runs := row_of(rig.model)) is not None:
            rig = with_own_tokens(rig, runs, ranks_along(TENSOR) or all_ranks())
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
                    "sharding: ranks that split layers or samples among them were given different samples: give rank r"
                    " of a loop of your own the share r // sharding.tensor, or r // sharding.context"
                )
        return self._run(rig, parts, total)


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
