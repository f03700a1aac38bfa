"""logits: whether the logits exist as a whole, or in chunks between the last layer and the loss."""

from lowvram.knobs.logits.chunked import ChunkedLogits, FullLogits, LazyLogits, TiledLogits

__all__ = ["ChunkedLogits", "FullLogits", "LazyLogits", "TiledLogits"]
