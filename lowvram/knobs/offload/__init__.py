"""offload: what waits in host memory while the device doesn't need it."""

from lowvram.knobs.offload.activations import Activations, ActivationsOnDisk, KeepOnDevice
from lowvram.knobs.offload.parameters import Parameters

__all__ = ["Activations", "ActivationsOnDisk", "KeepOnDevice", "Parameters"]
