"""Private names of torch.optim."""

from __future__ import annotations

import torch
from torch import nn

from tests.compat.sentences import needed

CLASSES = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")


@needed("torch.optim's _default_to_fused_or_foreach and _foreach_supported_types", by="plans of optimizer=external")
def test_optimizers_choose_lists_of_tensors_as_on_a_card() -> None:
    from lowvram.compat.torch_optim import foreach_chosen_by
    from tests.compat.test_torch_ops import packets_of

    def has_lists(name: str, is_on_card: bool, **more: bool) -> bool:
        parameters = [nn.Parameter(torch.ones(3)) for _ in range(2)]
        for parameter in parameters:
            parameter.grad = torch.ones(3)
        with foreach_chosen_by(lambda parameter: is_on_card):
            step = getattr(torch.optim, name)(parameters, lr=0.1, **more).step
            return any("_foreach_" in str(packet) for packet in packets_of(step))

    assert all(has_lists(name, True) for name in CLASSES)
    assert not any(has_lists(name, False) for name in CLASSES)
    assert not any(has_lists(name, True, foreach=False) for name in CLASSES)
