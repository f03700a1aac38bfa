"""Questions that no trial answers, but only those who wrote the model or described its data."""

from __future__ import annotations

from typing import NamedTuple

from lowvram.core.structure import Stated


class Tail(NamedTuple):
    """What a model computes after its last block."""

    blocks: tuple[str, ...]  # whose outputs it takes, in the order of the forward pass, the last block included
    method: str  # of the model: such an output to logits


TAIL = Stated[Tail | None]("What does the model compute after its last block?", None)
BRANCHES = Stated[tuple[tuple[str, ...], ...]](
    "Of each block: which modules' outputs does it add to what it was given? Empty: not known.", ()
)
HAS_FEW_SHAPES = Stated[bool]("Do batches have one shape, or one of a few, apart from the number of samples?", True)
HAS_SOFT_TARGETS = Stated[bool]("Does the criterion compare with `Part.soft`, too?", False)
READS_BLOCKS = Stated[bool]("Does the criterion read what blocks have made, beside the model's outputs?", False)
