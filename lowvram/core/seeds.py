"""A random generator for each name."""

from __future__ import annotations

import hashlib

import torch


def generator_for(seed: int, name: str, device: torch.device) -> torch.Generator:
    """A generator seeded by `seed` and `name`, so that its numbers don't depend on what else is drawn."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "big") >> 1)
