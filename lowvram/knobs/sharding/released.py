"""Messages that hold nothing when they have arrived.

Gloo's threads hold the tensors of a message for a moment after the wait for it has ended. They would still be alive
while the next ones are allocated, and a step's peak would be now one thing and now another.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from lowvram.compat.torch_fake import is_fake
from lowvram.compat.torch_storage import num_holders

LONGEST_HOLD_S = 1.0  # whoever holds a tensor for longer intends to keep it


@contextmanager
def released(*tensors: Tensor) -> Iterator[None]:
    """Ends when nobody else holds these tensors or their memory than before: messages inside it have ended then. On a
    card, whose messages are NCCL's, it waits for nobody."""
    real = [each for each in tensors if each.device.type == "cpu" and not is_fake(each)]
    before = [num_holders(each) for each in real]
    yield
    until_s = time.monotonic() + LONGEST_HOLD_S
    for tensor, number in zip(real, before, strict=True):
        while num_holders(tensor) > number and time.monotonic() < until_s:
            time.sleep(0)
