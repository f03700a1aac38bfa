"""sharding: how the point is spread over several ranks. Each rank takes its own slice of the logical batch.

The gradients of all ranks are *summed*, and every loss is divided by the number of targets of all ranks' parts. A mean
over ranks would weight targets differently if ranks have unequal numbers of them.
"""

from __future__ import annotations

from lowvram.knobs.sharding.base import Sharding, Unsharded
from lowvram.knobs.sharding.context import ContextParallel
from lowvram.knobs.sharding.ddp import DDP
from lowvram.knobs.sharding.fsdp import FSDP
from lowvram.knobs.sharding.pipeline import PipelineParallel
from lowvram.knobs.sharding.tensor import TensorParallel
from lowvram.knobs.sharding.zero1 import ZeRO1

__all__ = ["DDP", "FSDP", "ContextParallel", "PipelineParallel", "Sharding", "TensorParallel", "Unsharded", "ZeRO1"]
