"""Facts about a model's weights that its modules show without a trial."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn

from lowvram.core.fact import ModelFact
from lowvram.core.probes.stray import StrayRead
from lowvram.core.shared_memory import names_sharing
from lowvram.core.structure import Structure


def complex_weight(known: Structure) -> str | None:
    name = next((name for name, each in known.model.named_parameters() if each.is_complex()), None)
    return None if name is None else f"{name} is: leave that option, or keep it as two real weights"


def shared_memory(known: Structure) -> str | None:
    groups = names_sharing(known.model)
    return f"{' and '.join(groups[0])} do: make them one parameter, or copy the values" if groups else None


def stray_read(known: Structure) -> str | None:
    clause = known.get(StrayRead())
    remedy = "leave weights=device, offload=none and sharding=none, or choose sharding=ddp"
    return None if clause is None else f"{clause}: {remedy}"


def unshardable(model: nn.Module, blocks: Sequence[nn.Module]) -> str | None:
    """Why FSDP2 can't shard a weight of the model, block by block, and what to do; None if it can."""
    num_blocks_with = Counter(weight for block in blocks for weight in set(block.parameters()))
    in_blocks = {module for block in blocks for module in block.modules()}
    outside = {
        weight: name
        for name, module in model.named_modules()
        if module not in in_blocks
        for weight in module.parameters(recurse=False)
    }
    for name, weight in model.named_parameters():
        if weight.dim() == 0:
            return f"{name} is a single number: make it a vector of one, as by torch.ones(1)"
        if weight.numel() == 0:
            return f"{name} of shape {tuple(weight.shape)} is empty: leave it out"
        if num_blocks_with[weight] > 1:
            return f"{name} is in {num_blocks_with[weight]} blocks: give each a weight of its own, or leave that option"
        if weight in num_blocks_with and weight in outside:
            user = outside[weight] or "the model itself"
            return (
                f"{name} is in a block, and {user}, outside of the blocks, has it, too: give each a weight of its own,"
                " or leave that option"
            )
    return None


REAL_WEIGHTS = ModelFact("no weight is complex", complex_weight)
SEPARATE_MEMORY = ModelFact("no two weights share memory", shared_memory)
SHARDABLE = ModelFact(
    "each weight can be sharded, and is read through its module alone",
    lambda known: unshardable(known.model, known.blocks) or stray_read(known),
)
