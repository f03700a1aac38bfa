"""Whether a model computes the same where each rank has a run of each sample's tokens, and how it is told which: by
trial, in one process.

A model with random weights computes short samples, forward and backward: at once, and in threads that each have a run.
That its code takes the same way with samples of the real length is seen on tensors without memory: which functions of
torch's it calls, in which order, and with which settings. A window of attention, for example, shows there alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, final

from torch import Tensor, nn

from lowvram.compat.torch_trees import tree_leaves
from lowvram.compat.transformers import known_values_readable
from lowvram.config.errors import BadInput, Incompatible, require
from lowvram.config.texts import first_line
from lowvram.core.fact import ModelFact
from lowvram.core.probes.fake_pass import fake_pass
from lowvram.core.probes.runs import TOLD, As, Told
from lowvram.core.probes.stated import HAS_SOFT_TARGETS
from lowvram.core.structure import Probe, Structure, unless
from lowvram.knobs.sharding.attention import KEY
from lowvram.knobs.sharding.runs import has_tokens
from lowvram.knobs.sharding.runs_trial import Seen, is_same_by_trial, is_same_in_runs, path_of

NAMES = ("position_ids", "positions", "input_pos", "pos_ids", "pos")  # usual ones of arguments with positions
FEW = 7  # tokens of a rank, in a trial
MEND = (
    "tokens must meet in torch's scaled_dot_product_attention alone, without a mask, and a model with positions needs"
    f" an argument for them, such as position_ids ({KEY.partition('.')[0]}.positions names another); or choose"
    " sharding=fsdp or sharding=tensor"
)
NO_TEACHER = ModelFact(
    "the loss compares with targets alone",
    unless(
        lambda known: not known.get(HAS_SOFT_TARGETS),
        "this task has a teacher, who would see a rank's own tokens alone: choose sharding=fsdp",
    ),
)


@final
@dataclass(frozen=True)
class FindRuns(Probe[Told | None]):
    """How a model is told where its tokens are, if a row of ranks shares them out; None: it needn't be.

    Args:
        num_ranks: of the row.
        named: the argument that the user names; None: as is found.
    """

    num_ranks: int
    named: str | None = None

    def find(self, known: Structure) -> Told | None:
        """Raises Incompatible where the model would compute something else, or BadInput for a number of ranks that
        doesn't fit, or an argument that the model doesn't have."""
        inputs = known.example(2)
        number = length_of(known, inputs)
        require(number >= self.num_ranks, KEY, self.num_ranks, f"at most the {number} tokens of a sample")
        few = min(number, FEW * self.num_ranks + number % self.num_ranks)
        for told in self.candidates(known, inputs):
            compare = partial(is_same_in_runs, num_ranks=self.num_ranks, told=told)
            if is_same_by_trial(known, inputs, number, few, compare):
                check_way(known, inputs, number, few, self.num_ranks, told)
                return told
        raise refused("this model doesn't compute the same where each rank has a run of each sample's tokens")

    def candidates(self, known: Structure, inputs: Any) -> Iterator[Told | None]:
        arguments = signature(known.model.forward).parameters
        if self.named is not None:
            allowed = f"an argument of the model's forward: one of {', '.join(arguments)}"
            require(self.named in arguments, "sharding.positions", self.named, allowed)
        elif (stated := known.get(TOLD)) is not None:
            yield stated
            return
        given = inputs if isinstance(inputs, dict) else {}
        names = NAMES if self.named is None else (self.named,)
        for name in names:
            if name in arguments and name not in given:
                yield from (Told(name, how) for how in (As.row, As.line, As.first))
        if self.named is None:
            yield None


def refused(what: str) -> Incompatible:
    return Incompatible(f"{KEY}: {what}: {MEND}")


def length_of(known: Structure, inputs: Any, refused: Callable[[str], Incompatible] = refused) -> int:
    """How many tokens a sample has. Raises Incompatible where the model returns nothing for each token.

    Args:
        refused: makes the error of what is wrong.
    """
    try:
        outputs = fake_pass(known.model, lambda copy, fake: known.call(copy, fake), inputs)
    except (BadInput, Incompatible):
        raise
    except Exception as error:
        raise refused(f"this model can't be tried without memory ({first_line(error)})") from None
    sizes = {each.shape[1] if each.dim() > 2 else 0 for each in tree_leaves(outputs) if isinstance(each, Tensor)}
    number = sizes.pop() if len(sizes) == 1 else 0
    if not number or not any(has_tokens(leaf, number) for leaf in tree_leaves(inputs)):
        raise refused("this model doesn't return a row for each token of what it is given")
    return number


def check_way(
    known: Structure,
    inputs: Any,
    number: int,
    few: int,
    num_ranks: int,
    told: Told | None,
    refused: Callable[[str], Incompatible] = refused,
) -> None:
    """Raises Incompatible where the model's code takes another way with samples of the real length than with the few
    tokens of the trial.

    Args:
        refused: makes the error of what is wrong.
    """

    def ways(copy: nn.Module, fake: Any) -> list[list[Seen]]:
        return [path_of(known, copy, fake, number, each, ranks, how) for each in (few, number) for ranks, how in kinds]

    kinds: list[tuple[int, Told | None]] = [(1, None), (num_ranks, told)]
    try:
        with known_values_readable(lambda value: True):
            found = fake_pass(known.model, ways, inputs)
    except (BadInput, Incompatible):
        raise
    except Exception as error:
        raise refused(f"this model can't be tried without memory ({first_line(error)})") from None
    if found[:2] != found[2:]:
        raise refused(
            f"with {number} tokens this model computes otherwise than with {few}, as with a window of attention"
        )
