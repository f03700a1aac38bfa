"""Which block of the teacher each block of the student is compared with: one whose output has the same shape."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from torch import Tensor

from lowvram.config.errors import BadInput, require
from lowvram.core.assemble import bare_model
from lowvram.core.rig import is_per_sample
from lowvram.data.spec import TEXTS
from lowvram.models.sample_finder import calls_of
from lowvram.tasks import Problem

WEIGHT, CHOSEN = "task.feature_weight", "task.features"

Shape = tuple[int, ...]  # of the output of a block for one sample


class Call(NamedTuple):
    """A call of a block in a forward pass. Blocks that share weights are one block, called repeatedly."""

    block: int  # its number
    turn: int  # how often the block has been called before


Matches = dict[Call, Call]  # of the student: of the teacher


def find_matches(student: Problem, teacher: Problem, weight: float, chosen: list[int] | None) -> Matches:
    """For each call of a block of the student that of the teacher with which it is compared. Where both have calls that
    return one shape, but not as many, those of the student are spread evenly over those of the teacher, and the last is
    compared with the last.

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
        for shape in dict.fromkeys(ours)
        for number, partner in evenly(numbers_of(shape, ours), numbers_of(shape, theirs)).items()
    }
    if not matches:
        raise BadInput(WEIGHT, weight, no_match(student, teacher, ours, theirs))
    numbers = list(range(len(ours))) if chosen is None else chosen
    allowed = "numbers of the student's blocks, whose output has the shape of one of the teacher's blocks"
    allowed = f"{allowed}: of this model some of {sorted(matches)}"
    require(set(numbers) <= matches.keys(), CHOSEN, chosen, allowed)
    return {list(of_student)[number]: list(of_teacher)[matches[number]] for number in numbers}


def evenly(ours: list[int], theirs: list[int]) -> dict[int, int]:
    """For each of our numbers one of theirs, at even distances: after the same share of the blocks, rounded up."""
    places = [-(-(place + 1) * len(theirs) // len(ours)) - 1 for place in range(len(ours))]
    return {number: theirs[place] for number, place in zip(ours, places, strict=True)} if theirs else {}


def numbers_of(shape: Shape | None, shapes: list[Shape | None]) -> list[int]:
    """Of those with this shape; none if the shape isn't known."""
    return [number for number, each in enumerate(shapes) if each is not None and each == shape]


def calls_in(problem: Problem) -> dict[Call, Shape | None]:
    """The calls of the model's blocks, in their order, each with the shape of what it returns for one sample, of texts
    for the first tokens alone; None where that isn't of one sample. Found without memory; empty if that fails."""
    model = bare_model(problem)
    name_of = {module: name for name, module in model.named_modules()}
    names = [name_of[block] for block in problem.blocks(model)]
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
