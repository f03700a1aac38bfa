"""The compiler chooses what is recomputed.

He and Yu, "Transcending Runtime-Memory Tradeoffs in Checkpointing by being Fusion Aware" (2023).
"""

from __future__ import annotations

from dataclasses import dataclass

from lowvram.compat.torch_compiler import set_activation_budget
from lowvram.config.errors import require
from lowvram.core.fact import Fact
from lowvram.core.kind import Kind
from lowvram.core.knob import Exactness, Knob, Stage
from lowvram.core.probes.draws import NO_RANDOMNESS
from lowvram.core.probes.writes import STEADY_WEIGHTS
from lowvram.core.rig import Rig


@dataclass(frozen=True)
class CompilerBudget(Knob):
    """The compiler chooses what a graph keeps for its backward pass: at most a share of what it would keep by default.

    The share is of each graph's estimated bytes. It is no bound on the peak, which may even rise when the share falls
    (pytorch#197838).
    """

    budget: float = 0.5

    stage = Stage.CHECKPOINT
    exactness = Exactness.ROUNDING
    band = 1e-5
    saves = Kind.ACTIVATIONS
    # Recomputation would draw new random numbers, so gradients would use another dropout mask (pytorch#190758).
    needs_always = frozenset({Fact.COMPILED, NO_RANDOMNESS, STEADY_WEIGHTS})

    def __post_init__(self) -> None:
        allowed = "at least 0 (keep nothing) and below 1 (ckpt=none leaves the choice to the compiler)"
        require(0 <= self.budget < 1, "ckpt.budget", self.budget, allowed)

    def apply(self, rig: Rig) -> Rig:
        set_activation_budget(self.budget)
        return rig
