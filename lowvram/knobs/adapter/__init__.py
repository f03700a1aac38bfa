"""adapter: which parameters train, and whether small ones are added to train in their place."""

from lowvram.knobs.adapter.freeze import Freeze, NoAdapter
from lowvram.knobs.adapter.lora import Lora, QLora

__all__ = ["Freeze", "Lora", "NoAdapter", "QLora"]
