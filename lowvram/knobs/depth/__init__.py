"""depth: which blocks of the model compute in a step, for which samples, and which of them the head reads."""

from lowvram.knobs.depth.each_step import EveryBlock
from lowvram.knobs.depth.early_exit import EarlyExit
from lowvram.knobs.depth.layer_drop import LayerDrop
from lowvram.knobs.depth.stochastic import StochasticDepth

__all__ = ["EarlyExit", "EveryBlock", "LayerDrop", "StochasticDepth"]
