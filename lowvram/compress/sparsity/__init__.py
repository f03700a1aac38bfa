"""sparsity: which weights of the model are kept at zero while it trains, by masks of one byte a weight.

Masks save no memory while training, and dense products take as long as before. What they give is a trained model with
zeros.
"""

from lowvram.compress.sparsity.dynamic import RigL, Set
from lowvram.compress.sparsity.pruning import Magnitude, Movement
from lowvram.compress.sparsity.two_of_four import TwoOfFour
from lowvram.compress.sparsity.weights import NoSparsity

__all__ = ["Magnitude", "Movement", "NoSparsity", "RigL", "Set", "TwoOfFour"]
