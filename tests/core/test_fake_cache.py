"""FakeCache: what is made again is what torch would have made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from lowvram.compat.torch_fake import FakeTensorMode
from lowvram.core.fake_cache import CachedOperators, FakeCache, Recipes, described

ATEN = torch.ops.aten


@pytest.fixture
def fake_cache() -> Iterator[FakeCache]:
    with FakeTensorMode() as mode:
        yield FakeCache(mode)


CALLS: list[tuple[Any, Callable[[Tensor], tuple[Any, ...]], Callable[[Tensor], dict[str, Any]]]] = [
    (ATEN.mm.default, lambda x: (x, x.t()), lambda x: {}),
    (ATEN.mm.out, lambda x: (x, x.t()), lambda x: {"out": x.new_empty(4, 4)}),
    (ATEN.add_.Tensor, lambda x: (x, 1), lambda x: {}),
    (ATEN.view.default, lambda x: (x, [2, 12]), lambda x: {}),
    (ATEN._unsafe_view.default, lambda x: (x, [2, 12]), lambda x: {}),
    (ATEN.slice.Tensor, lambda x: (x[:, 2:], 0, 1, 3), lambda x: {}),
    (ATEN.split.Tensor, lambda x: (x, 2), lambda x: {}),
    (ATEN._to_copy.default, lambda x: (x.t(),), lambda x: {"dtype": torch.bfloat16}),
    (ATEN.native_layer_norm.default, lambda x: (x, [6], None, None, 1e-5), lambda x: {}),
    (ATEN._foreach_mul.Scalar, lambda x: ([x, x[1:]], 2.0), lambda x: {}),
    (ATEN._foreach_add_.Scalar, lambda x: ([x, x[1:]], 2.0), lambda x: {}),
    (ATEN.empty.memory_format, lambda x: ([3],), lambda x: {"device": torch.device("cpu")}),
]


@pytest.mark.parametrize(("operator", "args", "named"), CALLS, ids=lambda value: str(value).split("<")[0])
def test_what_is_made_again_is_alike(
    fake_cache: FakeCache, operator: Any, args: Callable[..., Any], named: Callable[..., Any]
) -> None:
    """In shape, strides, number format, and in whose memory it has."""
    told: list[Any] = []
    for run in (operator, *[lambda *args, **named: fake_cache.run(operator, args, named)] * 2):
        values = torch.empty(4, 6)
        given, by_name = args(values), named(values)
        told.append(described(run(*given, **by_name), (*given, *by_name.values())))
    assert told[0] == told[1] == told[2]
    assert len(fake_cache.shared) == 1


def test_what_is_made_again_has_attributes_of_its_own(fake_cache: FakeCache) -> None:
    """All that torch gives a tensor without memory."""
    values = torch.empty(4, 6)
    first, second, third = (fake_cache.run(ATEN.mm.default, (values, values.t()), {}) for _ in range(3))
    assert vars(first) == vars(second) == vars(third)
    assert vars(first)["fake_mode"] is fake_cache.mode
    second.constant = values
    assert third.constant is None
    assert fake_cache.run(ATEN.neg.default, (third,), {}).device == values.device


def test_what_was_met_once_is_not_worked_out_again(fake_cache: FakeCache) -> None:
    calls: list[int] = []

    def double(values: Tensor) -> Tensor:
        calls.append(1)
        return values * 2

    vars(double)["namespace"] = "aten"
    for shape in ((2, 3), (2, 3), (3, 2), (2, 3)):
        assert fake_cache.run(double, (torch.empty(shape),), {}).shape == shape
    assert len(calls) == 2


def test_formats_numbers_and_strides_tell_arguments_apart(fake_cache: FakeCache) -> None:
    whole, half = torch.empty(2, 3), torch.empty(2, 3, dtype=torch.float16)
    assert fake_cache.run(ATEN.mul.Tensor, (whole, 2), {}).dtype is torch.float32
    assert fake_cache.run(ATEN.mul.Tensor, (half, 2), {}).dtype is torch.float16
    count = torch.ones(2, dtype=torch.long)
    assert fake_cache.run(ATEN.mul.Tensor, (count, 1), {}).dtype is torch.long
    assert fake_cache.run(ATEN.mul.Tensor, (count, 1.0), {}).dtype is torch.float32
    square = torch.empty(3, 3)
    assert fake_cache.run(ATEN.clone.default, (square,), {}).stride() == (3, 1)
    assert fake_cache.run(ATEN.clone.default, (square.t(),), {}).stride() == (1, 3)


def test_what_depends_on_values_still_raises(fake_cache: FakeCache) -> None:
    for _ in range(2):
        with pytest.raises(DynamicOutputShapeException):
            fake_cache.run(ATEN.nonzero.default, (torch.empty(3),), {})


def test_tensors_of_another_mode_are_left_to_it(fake_cache: FakeCache) -> None:
    mine = torch.empty(2)
    fake_cache.run(ATEN.neg.default, (mine,), {})
    with FakeTensorMode() as other:
        theirs = fake_cache.run(ATEN.neg.default, (torch.empty(2),), {})
        assert theirs.fake_mode is other
    assert len(fake_cache.shared) == 1


def test_memory_that_an_argument_in_a_list_owns_is_not_made_anew(fake_cache: FakeCache) -> None:
    def first(tensors: list[Tensor]) -> Tensor:
        return tensors[0].view(-1)

    vars(first)["namespace"] = "aten"

    for _ in range(2):
        values = torch.empty(2, 3)
        out = fake_cache.run(first, ([values],), {})
        assert out.untyped_storage() is values.untyped_storage()


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "t_": lambda x: x.t_(),
    "resize_": lambda x: x.resize_(3, 5),
    "as_strided_": lambda x: x.as_strided_((2,), (1,)),
    "set_": lambda x: ATEN.set_.source_Tensor(x, torch.empty(4, 6)),
    "resize_as_": lambda x: ATEN.resize_as_.default(x, torch.empty(9)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_operator_that_changes_its_argument_does_so_each_time(change: str) -> None:
    """In shape, strides or memory: a plan took such an argument as it was."""
    with FakeTensorMode() as mode, CachedOperators(mode):
        found = list[Any]()
        for _ in range(3):
            given = torch.empty(4, 6)
            before = given.untyped_storage()
            CHANGES[change](given)
            after = given.untyped_storage()
            found.append((given.shape, given.stride(), after.nbytes(), after is before))
    assert found[0] == found[1] == found[2]
    assert found[0] != ((4, 6), (6, 1), 96, True)


def test_modes_share_recipes() -> None:
    """What is made for one mode is a tensor of that mode."""
    recipes: Recipes = {}
    for _ in range(2):
        with FakeTensorMode() as mode:
            fake_cache, values = FakeCache(mode, recipes), torch.empty(4, 6)
            product = fake_cache.run(ATEN.mm.default, (values, values.t()), {})
            assert vars(product)["fake_mode"] is mode
            assert fake_cache.run(ATEN.neg.default, (product,), {}).shape == (4, 4)
    assert len(recipes) == 2


def test_what_others_operators_make_is_worked_out_by_each_mode() -> None:
    """It may depend on more than their arguments, as on a setting of the library that has them."""
    recipes: Recipes = {}
    sizes = iter((2, 3))

    def theirs(values: Tensor) -> Tensor:
        return values.new_empty(next(sizes))

    vars(theirs)["namespace"] = "their_library"
    for size in (2, 3):
        with FakeTensorMode() as mode:
            fake_cache = FakeCache(mode, recipes)
            shapes = [fake_cache.run(theirs, (torch.empty(4),), {}).shape for _ in range(2)]
        assert shapes == [(size,)] * 2
    assert not recipes


def test_recipes_are_of_a_default_format() -> None:
    recipes: Recipes = {}
    found = list[torch.dtype]()
    for default in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(default)
        try:
            with FakeTensorMode() as mode:
                found.append(FakeCache(mode, recipes).run(ATEN.empty.memory_format, ([3],), {}).dtype)
        finally:
            torch.set_default_dtype(torch.float32)
    assert found == [torch.float32, torch.float64, torch.float32]
