"""logits: how the last layer and the loss meet."""

from lowvram.knobs.logits.chunked import ChunkedLogits, FullLogits, UnmadeLogits

__all__ = ["ChunkedLogits", "FullLogits", "UnmadeLogits"]
