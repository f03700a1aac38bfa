"""Randomness that belongs to names."""

from __future__ import annotations

import hashlib

import torch


def generator_for(seed: int, name: str, device: torch.device) -> torch.Generator:
    """Randomness that belongs to one name, whatever else is drawn before or after."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "big") >> 1)
