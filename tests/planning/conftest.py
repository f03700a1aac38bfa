"""What every test of plans starts from."""

from __future__ import annotations

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def no_group() -> None:
    """Of ranks: offload=parameters makes one, of this process alone, in whatever test came before."""
    if dist.is_initialized():
        dist.destroy_process_group()
