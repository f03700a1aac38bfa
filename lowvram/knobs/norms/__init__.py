"""norms: what norms keep for the backward pass. Begin with `keep_output`."""

from lowvram.knobs.norms.keep_output import KeepInput, KeepOutput

__all__ = ["KeepInput", "KeepOutput"]
