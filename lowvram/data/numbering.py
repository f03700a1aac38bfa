"""How the classes of data are numbered: as the trained head of the model that the data follow has them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

UNNAMED = re.compile(r"LABEL_\d+")  # what transformers calls the classes of a head that nobody has named


def are_named(names: Sequence[str]) -> bool:
    """Whether the classes of a head have names."""
    return not all(UNNAMED.fullmatch(name) for name in names)


def numbered(classes: Sequence[Any], of_head: Sequence[str] | None) -> tuple[tuple[str, ...], np.ndarray]:
    """The names of all classes, by number, and the number of each of the data's classes, (num_classes,) int64.

    Where all of the data's classes are among the head's, by name (small letters count as capital ones), or are numbers
    of its classes, all classes are the head's, and are numbered as there. Else they are the data's, in their order,
    which a head whose classes have names refuses.

    Args:
        classes: the data's: texts or whole numbers, all different.
        of_head: the names of a trained head's classes; None: there is no such head.
    """
    own = tuple(map(str, classes))
    numbers = None if of_head is None else by_name(own, of_head) or by_number(classes, of_head)
    if of_head is None or numbers is None:
        return own, np.arange(len(classes))
    names = list(of_head)
    if not are_named(of_head):
        for number, name in zip(numbers, own, strict=True):
            names[number] = name
    return tuple(names), np.array(numbers)


def by_name(classes: Sequence[str], of_head: Sequence[str]) -> list[int] | None:
    """The number of the head's class of each name; None unless it has all of them, and all are different."""
    for spelt in (str, str.casefold):
        places = {spelt(name): number for number, name in enumerate(of_head)}
        numbers = [places.get(spelt(name), -1) for name in classes]
        if len(places) == len(of_head) and -1 not in numbers and len({*numbers}) == len(numbers):
            return numbers
    return None


def by_number(classes: Sequence[Any], of_head: Sequence[str]) -> list[int] | None:
    """The classes, if all are different numbers of the head's classes. None if those have numbers for names."""
    numbers = [int(each) if isinstance(each, int) or each.isdecimal() else -1 for each in classes]
    is_fit = all(0 <= number < len(of_head) for number in numbers) and len({*numbers}) == len(numbers)
    return numbers if is_fit and not any(name.isdecimal() for name in of_head) else None
