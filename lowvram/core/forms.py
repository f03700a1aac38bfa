"""The forms of what goes from stage to stage of a pipeline: shapes and number formats, per sample."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from lowvram.config.errors import Incompatible
from lowvram.core.rig import Part

FORMATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MOST_DIMENSIONS = 8
NUM_NUMBERS = MOST_DIMENSIONS + 3  # that tell a form


class Form(NamedTuple):
    """Of what a stage makes of a part: (samples x rows, *rest)."""

    rows: int
    rest: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"({', '.join(map(str, (f'{self.rows} x samples', *self.rest)))}) of {self.dtype}"

    def as_numbers(self) -> Tensor:
        numbers = [self.rows, FORMATS.index(self.dtype), len(self.rest), *self.rest]
        return torch.tensor(numbers + [0] * (NUM_NUMBERS - len(numbers)), device="cpu")


def form_of(made: Tensor, num_samples: int) -> Form:
    """Raises Incompatible if no dimension counts samples, or there are too many."""
    rows, more = divmod(len(made) if made.dim() else 0, num_samples)
    if more or not rows or made.dim() > MOST_DIMENSIONS or made.dtype not in FORMATS:
        raise Incompatible(
            f"sharding=pipeline sends tensors of floating-point numbers with a row for each sample from stage to stage,"
            f" and a block has made one of shape {tuple(made.shape)} ({made.dtype}) of {num_samples} samples: choose"
            " sharding=fsdp"
        )
    return Form(rows, tuple(made.shape[1:]), made.dtype)


def from_numbers(numbers: Tensor) -> Form:
    rows, dtype, num_rest, *rest = numbers.tolist()
    return Form(rows, tuple(rest[:num_rest]), FORMATS[dtype])


Forms = dict[tuple[int, tuple[object, ...]], Form]  # by the stage that is given it, and the form of the part
_shared: list[Forms] = []  # of plans, which follow one stage after another


@contextmanager
def forms_shared(forms: Forms) -> Iterator[Forms]:
    """Inside it stages that can't talk to each other, as in a plan, find here what those before them have made."""
    _shared.append(forms)
    try:
        yield forms
    finally:
        _shared.pop()


def shared_forms() -> Forms:
    """The forms that stages know when they are made."""
    return _shared[-1] if _shared else {}


def form_before(stage: int, part: Part, forms: Forms) -> Form | None:
    """The form of what a stage is given of a part; None if nobody has told it. In a plan, which knows the stages of
    one rank at a time, that of the nearest stage before."""
    about = form_of_part(part)
    if (stage, about) in forms:
        return forms[stage, about]
    known = [index for index, key in forms if key == about and index < stage] if _shared else []
    return forms[max(known), about] if known else None


def form_of_part(part: Part) -> tuple[object, ...]:
    """Shapes and number formats of a part's tensors, per sample."""
    return tuple((len(each) / part.num_samples, each.shape[1:], each.dtype) for each in part.tensors() if each.dim())
