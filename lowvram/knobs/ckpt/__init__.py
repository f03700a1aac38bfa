"""ckpt: which blocks keep no activations and recompute them in the backward pass."""

from lowvram.knobs.ckpt.chosen import RecomputeChosen
from lowvram.knobs.ckpt.compiler import CompilerBudget
from lowvram.knobs.ckpt.every import KeepAll, RecomputeEvery
from lowvram.knobs.ckpt.segments import RecomputeSegments
from lowvram.knobs.ckpt.selective import Selective

__all__ = ["CompilerBudget", "KeepAll", "RecomputeChosen", "RecomputeEvery", "RecomputeSegments", "Selective"]
