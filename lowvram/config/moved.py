"""Classes that have moved: under which names YAMLs, folders and snapshots of earlier versions know them. Imports
nothing of ours."""

from __future__ import annotations

# Module by module: where a class was first -> where it is now.
MOVED = {
    "lowvram.knobs.qat": "lowvram.compress.qat",
    "lowvram.knobs.sparsity": "lowvram.compress.sparsity",
    "lowvram.loops.distillation": "lowvram.compress.distillation",
    "lowvram.loops.grow": "lowvram.compress.grow",
    "lowvram.loops.prune": "lowvram.compress.prune",
}


def present_name(target: str) -> str:
    """The dotted name of a class today."""
    return _renamed(target, MOVED)


def first_name(target: str) -> str:
    """The dotted name that a class had first, which the ids of points are made from: they stay as they were."""
    return _renamed(target, {new: old for old, new in MOVED.items()})


def _renamed(target: str, names: dict[str, str]) -> str:
    known = next((name for name in names if target.startswith(f"{name}.")), None)
    return target if known is None else names[known] + target.removeprefix(known)
