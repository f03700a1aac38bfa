"""Random generators, and seeds for each name."""

from __future__ import annotations

import hashlib

import torch


def generator_for(seed: int, name: str, device: torch.device) -> torch.Generator:
    """A generator seeded by `seed` and `name`, so that its numbers don't depend on what else is drawn."""
    return torch.Generator(device).manual_seed(seed_of(f"{seed}:{name}"))


def default_generator(device: torch.device) -> torch.Generator:
    """The generator from which operators on a device draw unless they are given another."""
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator


def seed_of(text: str) -> int:
    """63 bits that depend on the text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
