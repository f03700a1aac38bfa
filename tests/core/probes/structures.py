"""What is known of a model, for probes that are asked directly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from lowvram.core.probes.blocks import FoundBlocks
from lowvram.core.structure import Blocks, Probe, Structure


def structure_of(
    model: nn.Module,
    inputs: Tensor | Callable[[int], Tensor],
    blocks: Sequence[nn.Module] = (),
    call: Callable[[nn.Module, Any], Any] = lambda model, x: model(x),
) -> Structure:
    """Args: inputs: of two samples, or a function that makes those of so many."""
    inputs_of = (lambda _: inputs) if isinstance(inputs, Tensor) else inputs
    names = {module: name for name, module in model.named_modules()}
    found: dict[Probe[Any], Any] = {Blocks(): FoundBlocks(tuple(names[block] for block in blocks), None, False)}
    return Structure(model, call, inputs_of, inputs_of, found=found)
