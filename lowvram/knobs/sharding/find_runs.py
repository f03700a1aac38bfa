"""Whether a model computes the same where each rank has a run of each sample's tokens, and how it is told which: by
trial, in one process.

A model with random weights computes short samples, forward and backward: at once, and in threads that each have a run.
That its code takes the same way with samples of the real length is seen on tensors without memory: which functions of
torch's it calls, in which order, and with which settings. A window of attention, for example, shows there alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from torch import nn

from lowvram.config.errors import Incompatible, require
from lowvram.core.fact import ModelFact
from lowvram.core.probes.runs import Told, ways_to_tell
from lowvram.core.probes.stated import HAS_SOFT_TARGETS
from lowvram.core.probes.token_trial import Paths, check_way, is_same_by_trial, length_of, length_of_trial
from lowvram.core.structure import Probe, Structure, unless
from lowvram.knobs.sharding.attention import KEY
from lowvram.knobs.sharding.runs_trial import is_same_in_runs, path_of

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
        number = length_of(known, inputs, refused)
        require(number >= self.num_ranks, KEY, self.num_ranks, f"at most the {number} tokens of a sample")
        few = length_of_trial(known, number, FEW * self.num_ranks + number % self.num_ranks)
        for told in ways_to_tell(known, inputs, self.named):
            compare = partial(is_same_in_runs, num_ranks=self.num_ranks, told=told)
            if is_same_by_trial(known, inputs, number, few, compare):
                check_way(known, inputs, number, few, paths(known, number, self.num_ranks, told), refused)
                return told
        raise refused("this model doesn't compute the same where each rank has a run of each sample's tokens")


def refused(what: str) -> Incompatible:
    return Incompatible(f"{KEY}: {what}: {MEND}")


def paths(known: Structure, number: int, num_ranks: int, told: Told | None) -> Callable[[nn.Module, Any, int], Paths]:
    """What is called by a rank that has all tokens, and by the last one of a row.

    Args:
        number: how many tokens the inputs have.
    """

    def both(copy: nn.Module, fake: Any, length: int) -> Paths:
        whole, of_last = (
            path_of(known, copy, fake, number, length, ranks, how) for ranks, how in ((1, None), (num_ranks, told))
        )
        return Paths([whole, of_last], mixed=whole)

    return both
