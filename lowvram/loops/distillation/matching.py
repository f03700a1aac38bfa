"""Which block of the teacher each block of the student is compared with: one whose output has the same shape."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lowvram.config.errors import BadInput, require
from lowvram.core.assemble import bare_model
from lowvram.core.rig import is_per_sample
from lowvram.data.spec import TEXTS
from lowvram.models.sample_finder import uses_of
from lowvram.tasks import Problem

WEIGHT, CHOSEN = "task.feature_weight", "task.features"

Shape = tuple[int, ...]  # of the output of a block for one sample
Matches = dict[int, int]  # the number of a block of the student: that of its block of the teacher


def find_matches(student: Problem, teacher: Problem, weight: float, chosen: list[int] | None) -> Matches:
    """For each block of the student, by its number, that of the teacher's block with which it is compared. Where both
    have blocks of a shape, but not as many, those of the student are spread evenly over those of the teacher, and the
    last is compared with the last.

    Args:
        weight: `task.feature_weight`, for messages.
        chosen: the numbers of the student's blocks that are compared; None: all.

    Raises:
        BadInput: a block has no counterpart.
    """
    of_student, of_teacher = shapes_of(student), shapes_of(teacher)
    matches = {
        number: partner
        for shape in dict.fromkeys(of_student)
        for number, partner in evenly(numbers_of(shape, of_student), numbers_of(shape, of_teacher)).items()
    }
    if not matches:
        raise BadInput(WEIGHT, weight, no_match(student, teacher, of_student, of_teacher))
    numbers = list(range(len(of_student))) if chosen is None else chosen
    fitting = f"of this model some of {sorted(matches)}"
    allowed = f"numbers of the student's blocks, whose output has the shape of one of the teacher's blocks: {fitting}"
    require(set(numbers) <= matches.keys(), CHOSEN, chosen, allowed)
    return {number: matches[number] for number in numbers}


def evenly(ours: list[int], theirs: list[int]) -> Matches:
    """For each of our numbers one of theirs, at even distances: after the same share of the blocks, rounded up."""
    places = [-(-(place + 1) * len(theirs) // len(ours)) - 1 for place in range(len(ours))]
    return {number: theirs[place] for number, place in zip(ours, places, strict=True)} if theirs else {}


def numbers_of(shape: Shape | None, shapes: list[Shape | None]) -> list[int]:
    """Of the blocks with this shape; none if the shape isn't known."""
    return [number for number, each in enumerate(shapes) if each is not None and each == shape]


def shapes_of(problem: Problem) -> list[Shape | None]:
    """The shape of each block's output for one sample, in a forward pass without memory, of texts for the first tokens
    alone; None where it isn't known, or isn't of one sample."""
    model = bare_model(problem)
    name_of = {module: name for name, module in model.named_modules()}
    names = [name_of[block] for block in problem.blocks(model)]
    try:
        uses = uses_of(model, problem.call, problem.short_inputs(2), names)
    except Exception:  # of code that we don't know: its blocks aren't known
        return [None for _ in names]
    return [shape_of(uses[name].output) if name in uses else None for name in names]


def shape_of(output: Any) -> Shape | None:
    states = states_in(output)
    return tuple(states.shape[1:]) if states is not None and is_per_sample(states, 2) else None


def states_in(output: Any) -> Tensor | None:
    """The hidden states among what a block returns: the tensor, or the first in a tuple; None if there are none."""
    first = output[0] if isinstance(output, tuple) and output else output
    return first if isinstance(first, Tensor) and first.is_floating_point() else None


def no_match(student: Problem, teacher: Problem, of_student: list[Shape | None], of_teacher: list[Shape | None]) -> str:
    """What is allowed instead if no block of the student has a counterpart."""
    is_text = student.spec.modality in TEXTS
    widths = f"{described(of_student, is_text)} here and {described(of_teacher, is_text)} in the teacher"
    ours, theirs = (getattr(problem.model, "width", None) for problem in (student, teacher))
    is_typed = theirs is not None and ours != theirs and type(student.model) is type(teacher.model)
    mend = f"type model.width={theirs}" if is_typed else "choose another model or task.teacher"
    return f"0, unless the outputs of blocks are as wide as the teacher's: they are {widths}; {mend}, or leave it out"


def described(shapes: list[Shape | None], is_text: bool) -> str:
    """Of texts the widths, which stand last; of images channels x height x width."""
    known = [shape for shape in shapes if shape is not None]
    words = [str(shape[-1]) if is_text else "x".join(map(str, shape)) for shape in known]
    return " and ".join(dict.fromkeys(words)) or "of no known width"
