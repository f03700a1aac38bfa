"""activations: in how many bits the forward pass saves tensors for the backward pass. Begin with `few_bits`."""

from lowvram.knobs.activations.few_bits import FewBits, Full

__all__ = ["FewBits", "Full"]
