"""Whether a resumed run has the data and the frozen weights that it began with: neither is in its snapshots."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowvram.compat.torch_trees import tree_leaves
from lowvram.core.generators import same_draws_afterwards
from lowvram.core.states import frozen_parameters
from lowvram.data.source import Data, Samples

NUM_LOOKED_AT = 4  # samples, and frozen weights
NUM_NUMBERS = 2**16  # of a weight


def origins_of(data: Data, model: nn.Module, unchanged: Collection[str]) -> dict[str, Any]:
    """How many samples there are, and checksums of a few of them and of frozen weights.

    Args:
        unchanged: the names of frozen weights that are as they were made.
    """
    with same_draws_afterwards():
        samples = {"train": of_samples(data, data.train), "eval": of_samples(data, data.eval)}
    frozen = [(name, each) for name, each in frozen_parameters(model) if name in unchanged and is_plain(each)]
    return {"data": samples, "weights": {name: checksum(weight) for name, weight in spread(frozen)}}


def differences(now: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Lines about what isn't as it was when a snapshot was saved.

    Args:
        now, saved: `origins_of` this run and of that one.
    """
    lines = list[str]()
    if now["data"] != saved["data"]:
        num_now, num_then = (f"{each['data']['train'][0]} + {each['data']['eval'][0]}" for each in (now, saved))
        what = f"{num_now} samples, {num_then} then" if num_now != num_then else "other samples"
        lines.append(f"the data aren't those of the snapshot ({what}): losses before and after can't be compared")
    changed = [name for name, value in now["weights"].items() if saved["weights"].get(name, value) != value]
    if changed:
        lines.append(f"frozen weights aren't those of the snapshot ({changed[0]}): what trains was fitted to others")
    return lines


def of_samples(data: Data, samples: Samples) -> list[int | None]:
    """How many there are, and a checksum of a few; None where that isn't known, or where code of the user's makes them,
    which may draw."""
    try:
        count = len(samples)
    except TypeError:  # without end
        return [None, None]
    if not data.is_repeatable or samples.is_ordered or data.cache is not None:  # which counts what it is asked for
        return [count, None]
    try:
        leaves = [leaf for key in spread(range(count)) for leaf in tree_leaves(samples.sample(key, 0))]
    except Exception:  # of a damaged sample, which a step tells
        return [count, None]
    return [count, zlib.crc32(b"".join(map(bytes_of, leaves)))]


def spread(items: Any) -> list[Any]:
    """A few of a sequence, evenly."""
    num = min(NUM_LOOKED_AT, len(items))
    return [items[index * (len(items) - 1) // max(1, num - 1)] for index in range(num)]


def bytes_of(leaf: Any) -> bytes:
    return leaf.numpy().tobytes() if isinstance(leaf, Tensor) else repr(leaf).encode()


def is_plain(weight: Tensor) -> bool:
    """Whether a weight's numbers can be read at once."""
    return not isinstance(weight, DTensor) and type(weight) is nn.Parameter and weight.is_contiguous()


def checksum(weight: Tensor) -> int:
    first = weight.detach().view(-1)[:NUM_NUMBERS].cpu()
    return zlib.crc32(first.view(torch.uint8).numpy().tobytes())
