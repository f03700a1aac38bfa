"""One line of advice for a point that ran out of memory or waited for its data. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

_SENTENCE = {
    "parameters": "parameters are",
    "gradients": "gradients are",
    "optimizer": "the optimizer's state is",
    "activations": "activations are",
    "inputs": "inputs are",
    "other": "other memory is",
}
# What makes a kind of memory smaller, the strongest first. A group's options are offered in this order.
_REMEDIES = {
    "activations": ("ckpt", "accum", "precision"),
    "inputs": ("accum",),
    "optimizer": ("optimizer",),
    "parameters": (),
    "gradients": (),
    "other": ("accum", "ckpt"),
}
# The next option to try, from the one in use; an option that isn't listed has no better one in its group.
_NEXT = {
    "ckpt": dict.fromkeys(("none", "every2", "every3", "every4", "selective"), "every1"),
    "accum": {"none": "x8", "x2": "x8", "x4": "x8", "x8": "x16", "x16": "x32"},
    "precision": dict.fromkeys(("fp32", "tf32"), "bf16"),
    "optimizer": dict.fromkeys(("adamw", "adamw_8bit", "adamw_4bit", "adafactor", "muon"), "sgd"),
}
_NEUTRAL = {"ckpt": "none", "accum": "none", "precision": "fp32", "optimizer": "adamw"}
_WORTH_SAYING = 0.1


def out_of_memory_advice(by_kind: Mapping[str, float] | None, choices: Mapping[str, str]) -> str:
    """What to try next, from the bytes of each kind at the peak and the options in use.

    >>> out_of_memory_advice({"activations": 71, "parameters": 29}, {"ckpt": "none", "accum": "none"})
    'activations are 71 % of the peak: try ckpt=every1 or accum=x8'
    """
    sizes = {kind: float((by_kind or {}).get(kind) or 0.0) for kind in _SENTENCE}
    total = sum(sizes.values())
    # Without a measurement the order of _REMEDIES stands: sorting keeps it.
    order = sorted(_REMEDIES, key=lambda kind: -sizes[kind])
    options = list(_options(order, choices))[:2]
    advice = f"try {' or '.join(options)}" if options else "try a smaller model or a larger vram"
    if not total:
        return advice
    largest = max(sizes, key=lambda kind: sizes[kind])
    return f"{_SENTENCE[largest]} {100 * sizes[largest] / total:.0f} % of the peak: {advice}"


def _options(kinds: list[str], choices: Mapping[str, str]) -> Iterator[str]:
    groups = dict.fromkeys(group for kind in kinds for group in _REMEDIES[kind])
    for group in groups:
        better = _NEXT[group].get(choices.get(group, _NEUTRAL[group]))
        if better is not None:
            yield f"{group}={better}"


def data_wait_advice(data_wait_frac: float | None, choices: Mapping[str, str]) -> str | None:
    """A line when more than a tenth of the time was spent waiting for data, None otherwise."""
    if data_wait_frac is None or not data_wait_frac > _WORTH_SAYING or choices.get("loader") != "inline":
        return None
    return f"{100 * data_wait_frac:.0f} % of the time was spent waiting for data: try loader=workers"
