"""tile=blocks: the blocks compute a few samples at a time.

What accumulation does for a whole model, this does for each block. With accum=… the gradients of all weights wait until
the last part has passed. Here all samples pass one block before the next, so the gradients of a block are complete as
soon as it is done.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import Signature, signature
from typing import Any, final

from torch import Tensor, nn

from lowvram.compat.torch_trees import tree_flatten
from lowvram.config.errors import require
from lowvram.core.fact import Fact
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob, Neutral, Stage
from lowvram.core.misfits import ONCE
from lowvram.core.probes.calls import is_per_sample
from lowvram.core.probes.separate_samples import SEPARATE_SAMPLES, SeparateBlocks
from lowvram.core.repeat import Repeatable
from lowvram.core.rig import Rig
from lowvram.core.structure import BLOCKS
from lowvram.knobs.tile.arguments import Arguments
from lowvram.knobs.tile.chunks import Chunks, Inner, in_chunks


@dataclass(frozen=True)
class Whole(Neutral):
    """Every block computes a whole part at once."""

    stage = Stage.CHECKPOINT


@dataclass(frozen=True)
class TiledBlocks(Knob):
    """Each block computes `samples` samples of a part at a time, keeps only its inputs, and computes them again in the
    backward pass."""

    samples: int = 1

    stage = Stage.CHECKPOINT
    band = 2e-6
    misfits = ONCE
    saves = Kind.ACTIVATIONS
    needs_always = frozenset({Fact.EAGER_AUTOGRAD, BLOCKS, SEPARATE_SAMPLES})
    remedy = (Kind.ACTIVATIONS, 110)  # the last: with ckpt=every1 it saves only where a part has more samples

    def __post_init__(self) -> None:
        require(self.samples >= 1, "tile.samples", self.samples, "at least 1")

    def apply(self, rig: Rig) -> Rig:
        for name, num_outputs in rig.structure.get(SeparateBlocks()).items():
            block = rig.model.get_submodule(name)
            block.forward = Tiled(block, block.forward, num_outputs, self.samples)
        return rig


@final
class Tiled:
    """A block that computes its samples in chunks. With at most `samples` samples it is as it was.

    Args:
        num_outputs: as `SeparateBlocks` counts them.
    """

    def __init__(self, block: nn.Module, forward: Any, num_outputs: int, samples: int) -> None:
        self.repeatable, self.call = Repeatable(block), forward
        self.num_outputs, self.samples = num_outputs, samples

    @property
    def __signature__(self) -> Signature:
        return signature(self.call)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        leaves, nesting = tree_flatten((inputs, named))
        num_samples = next(leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point())
        if num_samples <= self.samples:
            return self.call(*inputs, **named)
        places = [place for place, leaf in enumerate(leaves) if is_per_sample(leaf, num_samples)]
        arguments = Arguments(leaves, nesting, places, self.num_outputs)
        inner = Inner(self.repeatable, arguments.given_chunks(self.call))
        return arguments.returned(in_chunks(inner, Chunks(0, self.samples), arguments.tensors))
