"""tile: whether blocks, or the MLPs in them, compute a part at once or in chunks."""

from lowvram.knobs.tile.blocks import TiledBlocks, Whole
from lowvram.knobs.tile.mlp import TiledMLP
from lowvram.knobs.tile.tokens import TiledTokens

__all__ = ["TiledBlocks", "TiledMLP", "TiledTokens", "Whole"]
