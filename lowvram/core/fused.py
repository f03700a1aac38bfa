"""Operators made of others: one compiled kernel on a card, and one operator for plans and ledgers everywhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from lowvram.compat.torch_modes import without_dispatch_modes

TAKEN: set[str] = set()  # the names of all operators


def fused(schema: str, formula: Callable[..., None], in_pieces: Callable[..., None]) -> Callable[..., None]:
    """An operator that writes into its arguments and returns nothing.

    Args:
        schema: its name and its arguments, such as "add_in_bf16(Tensor(a!) sums, Tensor values, int seed) -> ()".
        formula: what it does, in torch's operators. A card runs it as one kernel, which torch.compile makes at the
            first call: it needs no memory for what lies between the operators.
        in_pieces: calls `formula` for one piece after another, so that other devices need little memory for it.
    """

    @cache
    def compiled() -> Callable[..., None]:  # not before a card asks: torch imports its compiler here, for seconds
        return torch.compile(formula, dynamic=True)

    def on_card(*args: Any) -> None:
        with without_dispatch_modes():  # inside one nothing may be compiled
            compiled()(*args)

    name, _, signature = schema.partition("(")
    if name in TAKEN:  # torch would silently replace the other one
        raise ValueError(f"there are two operators called {name}")
    TAKEN.add(name)
    written = [argument.split()[1] for argument in signature.partition(") ->")[0].split(", ") if "!)" in argument]
    operator = torch.library.custom_op(f"lowvram::{name}", in_pieces, mutates_args=written, schema=f"({signature}")
    operator.register_kernel("cuda", on_card)
    operator.register_fake(lambda *args: None)
    return operator
