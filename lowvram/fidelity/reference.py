"""What the fidelity of a point is measured against: the same training without any technique that saves memory.

Model, data, loader, logical batch, seed and schedule are the same. Every knob group has its neutral option, in fp32,
except where an option decides what is learnt rather than how (`Knob.reference`). So both start with the same weights:

- They are a function of the seed and of each parameter's name (core/seeds.py), drawn in fp32. precision=bf16_pure
  and bf16_split round these same numbers; adapter=qlora packs them into 4 bits. What that costs is part of the error.
- Optimizers start without state, so with low-bit ones the first step has the same weights and gradients as with AdamW;
  their errors show in the losses of later steps.
- An adapter keeps the names and the initial values of its matrices; gradients are those of the trainable parameters.
- stepping=cpu_offload trains fp32 copies, which begin as the device's weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from typing import Any

from omegaconf import OmegaConf

from lowvram.config.registry import neutral_options, node_of, options_of
from lowvram.config.schema import find_target
from lowvram.config.settings import KNOB_GROUPS, settings
from lowvram.core.knob import Knob


def reference_of(config: Mapping[str, Any], choices: Mapping[str, str]) -> dict[str, Any]:
    """The reference's configuration and choices of options, for a point with these."""
    groups = settings(dict(config)).groups
    nodes, options = dict[str, Any](), dict(choices)
    for group in KNOB_GROUPS:
        knob = groups[group].reference()
        options[group] = neutral_options()[group] if knob is None else option_like(group, choices[group], knob)
        nodes[group] = OmegaConf.to_container(node_of(group, options[group])) if knob is None else as_node(knob)
    return {"config": {**config, **nodes}, "choices": options}


def option_like(group: str, in_use: str, knob: Knob) -> str:
    """The name of an option of the knob's class: the one in use, if it is of that class."""
    names = [in_use, *options_of(group)]
    return next(name for name in names if find_target(group, node_of(group, name)["_target_"]) is type(knob))


def as_node(knob: Knob) -> dict[str, Any]:
    """A knob as a node of the configuration, from which `build` makes it again."""
    values = {item.name: getattr(knob, item.name) for item in fields(knob)}  # pyright: ignore[reportArgumentType]
    plain = {name: value.name if isinstance(value, Enum) else value for name, value in values.items()}
    return {"_target_": f"{type(knob).__module__}.{type(knob).__qualname__}", **plain}
