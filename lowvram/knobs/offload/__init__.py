"""offload: what waits in host memory while the device doesn't need it."""

from lowvram.knobs.offload.activations import Activations, ActivationsOnDisk
from lowvram.knobs.offload.parameters import Parameters
from lowvram.knobs.offload.stay import KeepOnDevice

__all__ = ["Activations", "ActivationsOnDisk", "KeepOnDevice", "Parameters"]
