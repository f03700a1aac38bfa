"""The memory that an update takes in kernels which no dispatch mode sees."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch


class CompiledUpdate(torch.optim.Optimizer, ABC):
    """An optimizer whose update is compiled, so that neither a ledger nor a trace sees its operators."""

    @abstractmethod
    def scratch_bytes(self) -> Iterator[list[int]]:
        """The temporaries of each parameter that has a gradient, in the order in which a card's allocator is asked for
        them. Those of one parameter live together, until its update has run."""
