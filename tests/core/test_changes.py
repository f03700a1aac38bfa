"""What a forward pass changes beside what it returns."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowvram.config.errors import Incompatible
from lowvram.core.changes import LARGE_BYTES, Look
from lowvram.core.places import Places


def test_a_large_tensor_that_changes_late_names_all_options_that_have_to_undo_it() -> None:
    module = nn.Module()
    module.register_buffer("codes", torch.zeros(LARGE_BYTES // 4 + 1))
    places = Places(module)
    assert Look(places).changes() == []
    look = Look(places)
    module.get_buffer("codes").add_(1)
    with pytest.raises(
        Incompatible, match=r"^Module\.codes was changed.*\(ckpt, tile, .*torchscript, .*zeroth_order\)$"
    ):
        look.changes()
