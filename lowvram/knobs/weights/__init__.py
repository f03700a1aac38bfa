"""weights: where the weights wait while they don't compute."""

from lowvram.knobs.weights.stream import OnDevice, StreamedWeights

__all__ = ["OnDevice", "StreamedWeights"]
