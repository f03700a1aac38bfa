"""The values that a plan knows of tensors without memory, and those that it doesn't."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lowvram.core.rig import MakeOptimizer
from lowvram.data.spec import DataSpec, Modality
from lowvram.planning.trace.fake import CantPlan, example, fake_tensors


def positions() -> Tensor:
    return torch.arange(6).expand(2, -1)


def written_in_place() -> Tensor:
    mask = torch.ones(2, 3, dtype=torch.long)
    mask[:, -1] = 0
    mask += mask.T.reshape(2, 3)
    return mask


def read_before_it_is_written() -> Tensor:
    counts = torch.zeros(3, dtype=torch.int32)
    before = counts + 1
    counts.fill_(7)
    return torch.cat([before, counts])


def mask_in_numbers() -> Tensor:
    mask = torch.ones(2, 3)
    return mask.to(torch.bool).sum() == mask.numel()


MADE: list[Callable[[], Tensor]] = [
    positions,
    lambda: positions().diff(prepend=positions()[:, :1] - 1, dim=-1) != 1,
    lambda: torch.tensor([[3, 1], [2, 5]]).T.cumsum(-1),
    lambda: positions().to(torch.uint8).flip(1)[:, ::2].contiguous(),
    written_in_place,
    mask_in_numbers,
    lambda: torch.linspace(0, 1, 4).square(),
    read_before_it_is_written,
]


@pytest.mark.parametrize("make", MADE, ids=range(len(MADE)))
def test_what_follows_from_constants_and_shapes_is_known(make: Callable[[], Tensor]) -> None:
    with fake_tensors():
        found = make().tolist()
    assert found == make().tolist()


def chance() -> Tensor:
    return torch.randint(9, (1,))


def memory() -> Tensor:
    return torch.empty(1, dtype=torch.long)


def spoiled() -> Tensor:
    counts = torch.zeros(2, dtype=torch.long)
    counts.view(2, 1)[:1] += torch.empty(1, 1, dtype=torch.long)
    return counts[1]


def out_of_weights() -> Tensor:
    return nn.Linear(3, 3).weight.argmax()


def result_in_an_argument() -> Tensor:
    counts = torch.zeros(1, dtype=torch.long)
    torch.add(torch.ones(1, dtype=torch.long), 1, out=counts)
    return counts


@pytest.mark.parametrize("make", [chance, memory, spoiled, out_of_weights, result_in_an_argument])
def test_what_depends_on_anything_else_is_not(make: Callable[[], Tensor]) -> None:
    with pytest.raises(CantPlan, match="depends on the values of a tensor"), fake_tensors():
        make().item()


def test_a_value_of_many_operators_is_unknown_and_no_recursion_error() -> None:
    def counted() -> Tensor:
        count = torch.zeros((), dtype=torch.long)
        for _ in range(5000):
            count += 1
        return count

    with pytest.raises(CantPlan, match="depends on the values of a tensor"), fake_tensors():
        counted().item()


def test_of_samples_only_masks_and_positions_are_known() -> None:
    texts = DataSpec(Modality.LABELLED_TOKENS, 3, (5,), 256)
    with fake_tensors() as known:
        padded, whole = (
            example(DataSpec(Modality.LABELLED_TOKENS, 3, (5,), 256, is_padded=is_padded), 2, known)
            for is_padded in (True, False)
        )
        assert padded.inputs["attention_mask"].tolist() == [[1, 1, 1, 1, 0]] * 2
        assert whole.inputs["attention_mask"].tolist() == [[1] * 5] * 2
    for tensor in (lambda part: part.inputs["input_ids"], lambda part: part.targets):
        with pytest.raises(CantPlan, match="depends on the values"), fake_tensors() as known:
            tensor(example(texts, 2, known)).sum().item()


@pytest.mark.parametrize("make", [torch.optim.NAdam, torch.optim.Adafactor, torch.optim.ASGD, torch.optim.Rprop])
def test_an_optimizer_may_read_values_that_are_unknown(make: MakeOptimizer) -> None:
    with fake_tensors():
        layer = nn.Linear(3, 2)
        optimizer = make([*layer.parameters()])
        for _ in range(2):
            layer(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        assert optimizer.state_dict()["state"]
