"""Operators made of others: one compiled kernel on a card, and one operator for plans and ledgers everywhere. And
optimizers whose compiled kernels no ledger sees."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch.autograd.graph import increment_version

from lowvram.compat.torch_autograd import below_autograd
from lowvram.compat.torch_modes import is_in_dispatch_mode, without_dispatch_modes

# Below torch.library.custom_op, whose wrappers in Python take longer at each call than a card does.
LIBRARY = torch.library.Library("lowvram", "FRAGMENT")
TAKEN: set[str] = set()  # the names of all operators
LAUNCHED: set[Any] = set()  # operators with a kernel that is written by hand
COSTLY: set[Any] = set()  # operators that take long for the memory of their results: ckpt=selective keeps these


def fused(
    schema: str,
    formula: Callable[..., None],
    in_pieces: Callable[..., None],
    launch: Callable[..., None] | None = None,
) -> Callable[..., None]:
    """An operator that writes into its arguments and returns nothing.

    Args:
        schema: its name and its arguments, such as "add_in_bf16(Tensor(a!) sums, Tensor values, int seed) -> ()".
        formula: what it does, in torch's operators. A card runs it as one kernel, which torch.compile makes at the
            first call, unless `launch` is given: it needs no memory for what lies between the operators.
        in_pieces: calls `formula` for one piece after another, so that other devices need little memory for it.
        launch: launches a kernel on a card that is written by hand and computes the same. Outside of dispatch modes it
            is called past torch's dispatcher, which takes the host longer than the launch.
    """
    name, _, signature = schema.partition("(")
    arguments = signature.partition(") ->")[0].split(", ")
    written = [place for place, argument in enumerate(arguments) if "!)" in argument]
    if name in TAKEN:  # torch would silently replace the other one
        raise ValueError(f"there are two operators called {name}")
    TAKEN.add(name)
    LIBRARY.define(schema)
    LIBRARY.impl(name, noted(in_pieces, written), "CompositeExplicitAutograd")
    LIBRARY.impl(name, noted(launch or compiled(formula), written), "CUDA")
    LIBRARY.impl(name, lambda *args: None, "Meta")
    operator = getattr(torch.ops.lowvram, name).default
    return operator if launch is None else launched(operator, launch)


def noted(kernel: Callable[..., None], written: list[int]) -> Callable[..., None]:
    """The kernel; afterwards autograd knows that it has written into its arguments of these places."""

    def call(*args: Any) -> None:
        kernel(*args)
        increment_version([args[place] for place in written])

    return call


def compiled(formula: Callable[..., None]) -> Callable[..., None]:
    """The formula as one kernel."""

    @cache
    def kernel() -> Callable[..., None]:  # not before a card asks: torch imports its compiler here, for seconds
        return torch.compile(formula, dynamic=True)

    def call(*args: Any) -> None:
        # Inside a dispatch mode nothing may be compiled; wherever a kernel is called, it is compiled but once.
        with torch.no_grad(), below_autograd(), without_dispatch_modes():
            kernel()(*args)

    return call


def launched(operator: Any, launch: Callable[..., None]) -> Callable[..., None]:
    """The operator; on a card, where no dispatch mode is to see it, its kernel at once."""
    LAUNCHED.add(operator)

    def call(*args: Any) -> None:
        if args[0].is_cuda and not is_in_dispatch_mode():
            launch(*args)
        else:
            operator(*args)

    return call


class CompiledUpdate(torch.optim.Optimizer, ABC):
    """An optimizer whose update is compiled, so that neither a ledger nor a trace sees its operators."""

    @abstractmethod
    def scratch_bytes(self) -> Iterator[list[int]]:
        """The temporaries of each parameter that has a gradient, in the order in which a card's allocator is asked for
        them. Those of one parameter live together, until its update has run."""
