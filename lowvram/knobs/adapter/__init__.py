"""adapter: which parameters train, and whether small ones are added to train in their place."""

from lowvram.knobs.adapter.badam import BAdam, Order
from lowvram.knobs.adapter.freeze import Freeze, NoAdapter
from lowvram.knobs.adapter.lora import Lora, QLora
from lowvram.knobs.adapter.over_time import Lisa, Progressive

__all__ = ["BAdam", "Freeze", "Lisa", "Lora", "NoAdapter", "Order", "Progressive", "QLora"]
