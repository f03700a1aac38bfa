"""Which block of the teacher each block of the student is compared with: one that returns as many tokens or pixels."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from torch import Tensor

from lowvram.config.errors import BadInput, require
from lowvram.core.assemble import bare_model
from lowvram.core.probes.calls import calls_of, is_per_sample
from lowvram.core.structure import Blocks
from lowvram.data.spec import TEXTS
from lowvram.tasks import Problem

WEIGHT, CHOSEN = "task.feature_weight", "task.features"

Shape = tuple[int, ...]  # of the output of a block for one sample
IMAGE_NDIM = 3  # channels, height and width


class Call(NamedTuple):
    """A call of a block in a forward pass. Blocks that share weights are one block, called repeatedly."""

    block: int  # its number
    turn: int  # how often the block has been called before


class Partner(NamedTuple):
    """The teacher's call that a call of the student is compared with, and how many numbers each returns at a place."""

    call: Call
    width: int
    student_width: int


Matches = dict[Call, Partner]  # by the student's call


def find_matches(student: Problem, teacher: Problem, weight: float, chosen: list[int] | None) -> Matches:
    """For each call of a block of the student that of the teacher with which it is compared. Where both have calls that
    return as many tokens or pixels, but not as many calls, those of the student are spread evenly over those of the
    teacher, and the last is compared with the last.

    Args:
        weight: `task.feature_weight`, for messages.
        chosen: the numbers of the student's calls that are compared, in the order of the forward pass; None: all.

    Raises:
        BadInput: a block has no counterpart.
    """
    of_student, of_teacher = calls_in(student), calls_in(teacher)
    ours, theirs = (list(calls.values()) for calls in (of_student, of_teacher))
    matches = {
        number: partner
        for places in dict.fromkeys(map(places_of, ours))
        for number, partner in evenly(numbers_of(places, ours), numbers_of(places, theirs)).items()
    }
    if not matches:
        raise BadInput(WEIGHT, weight, no_match(student, ours, theirs))
    numbers = list(range(len(ours))) if chosen is None else chosen
    allowed = "numbers of the student's blocks that return as many tokens or pixels as one of the teacher's"
    allowed = f"{allowed}: of this model some of {sorted(matches)}"
    require(set(numbers) <= matches.keys(), CHOSEN, chosen, allowed)

    def partner(number: int) -> Partner:
        call, shape = list(of_teacher.items())[matches[number]]
        return Partner(call, width_of(shape), width_of(ours[number]))

    return {list(of_student)[number]: partner(number) for number in numbers}


def evenly(ours: list[int], theirs: list[int]) -> dict[int, int]:
    """For each of our numbers one of theirs, at even distances: after the same share of the blocks, rounded up."""
    places = [-(-(place + 1) * len(theirs) // len(ours)) - 1 for place in range(len(ours))]
    return {number: theirs[place] for number, place in zip(ours, places, strict=True)} if theirs else {}


def numbers_of(places: Shape | None, shapes: list[Shape | None]) -> list[int]:
    """Of those with these places; none if the places aren't known."""
    return [number for number, each in enumerate(shapes) if places is not None and places_of(each) == places]


def places_of(shape: Shape | None) -> Shape | None:
    """The places of a shape without the width at each: of pixels, whose channels stand first, or of tokens."""
    return shape and (shape[1:] if len(shape) == IMAGE_NDIM else shape[:-1])


def width_of(shape: Shape | None) -> int:
    """How many numbers there are at each place."""
    assert shape is not None
    return shape[0] if len(shape) == IMAGE_NDIM else shape[-1]


def calls_in(problem: Problem) -> dict[Call, Shape | None]:
    """The calls of the model's blocks, in their order, each with the shape of what it returns for one sample, of texts
    for the first tokens alone; None where that isn't of one sample. Found without memory; empty if that fails."""
    model = bare_model(problem)
    names = problem.structure(model).get(Blocks()).blocks
    try:
        uses = calls_of(model, problem.call, problem.short_inputs(2), names)
    except Exception:  # of code that we don't know: its blocks aren't known
        return {}
    turns, calls = Counter[str](), dict[Call, Shape | None]()
    for name, use in uses:
        calls[Call(names.index(name), turns[name])] = shape_of(use.output)
        turns[name] += 1
    return calls


def shape_of(output: Any) -> Shape | None:
    states = states_in(output)
    return tuple(states.shape[1:]) if states is not None and is_per_sample(states, 2) else None


def states_in(output: Any) -> Tensor | None:
    """The hidden states among what a block returns: the tensor, or the first in a tuple; None if there are none."""
    first = output[0] if isinstance(output, tuple) and output else output
    return first if isinstance(first, Tensor) and first.is_floating_point() else None


def no_match(student: Problem, of_student: list[Shape | None], of_teacher: list[Shape | None]) -> str:
    """What is allowed instead if no block of the student has a counterpart."""
    is_text = student.spec.modality in TEXTS
    sizes = f"{described(of_student, is_text)} here and {described(of_teacher, is_text)} in the teacher"
    allowed = "0, unless blocks return as many tokens or pixels as the teacher's"
    return f"{allowed}: they are {sizes}; choose another model or task.teacher, or leave it out"


def described(shapes: list[Shape | None], is_text: bool) -> str:
    """Of texts the widths, which stand last; of images channels x height x width."""
    known = [shape for shape in shapes if shape is not None]
    words = [str(shape[-1]) if is_text else "x".join(map(str, shape)) for shape in known]
    return " and ".join(dict.fromkeys(words)) or "of no known width"
