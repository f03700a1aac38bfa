"""One line of advice for a point that ran out of memory or waited for its data. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lowvram.results.row import size_text

_SENTENCE = {
    "parameters": "parameters are",
    "gradients": "gradients are",
    "optimizer": "the optimizer's state is",
    "activations": "activations are",
    "inputs": "inputs are",
    "other": "other memory is",
}
# What makes a kind of memory smaller, the best first: a group, its option, and those in use that it is better than.
# Of each group one is offered.
_ACCUM = (("accum", "x8", "none x2 x4"), ("accum", "x4", "none x2"), ("accum", "x2", "none"))
_MORE_ACCUM = (("accum", "x16", "x8"), ("accum", "x32", "x16"))
_CKPT = ("ckpt", "every1", "none every2 every3 every4 selective")
_REMEDIES = {
    "activations": (
        _CKPT,
        *_ACCUM,
        ("offload", "activations", "none"),
        ("precision", "bf16", "fp32 tf32"),
        *_MORE_ACCUM,
    ),
    "inputs": (*_ACCUM, *_MORE_ACCUM),
    "optimizer": (
        ("optimizer", "adamw_8bit", "adamw muon"),
        ("optimizer", "adamw_4bit", "adamw_8bit"),
        ("stepping", "cpu_offload", "after_backward"),
    ),
    "parameters": (("precision", "bf16_pure", "fp32 tf32 bf16 fp16"), ("offload", "parameters", "none")),
    "gradients": (("stepping", "in_backward", "after_backward"),),
    "other": (*_ACCUM, _CKPT),
}
_NEUTRAL = {
    "ckpt": "none",
    "accum": "none",
    "precision": "fp32",
    "optimizer": "adamw",
    "stepping": "after_backward",
    "offload": "none",
}
_WORTH_SAYING = 0.1
_NUM_OFFERED = 2
_SMALL_SHARE = 0.5  # of the room: if the tensors of a step take less, they aren't to blame


def out_of_memory_advice(
    by_kind: Mapping[str, float] | None,
    choices: Mapping[str, str],
    is_possible: Callable[[str, str], bool] = lambda group, option: True,
    room_bytes: int | None = None,
) -> str:
    """What to try next, from the bytes of each kind at the peak and the options in use.

    Args:
        is_possible: whether an option can take the place of the one in use in its group.
        room_bytes: what the point was allowed to hold, if it was limited.

    >>> out_of_memory_advice({"activations": 71, "parameters": 29}, {"ckpt": "none", "accum": "none"})
    'activations are 71 % of the peak: try ckpt=every1 or accum=x8'
    """
    sizes = {kind: float((by_kind or {}).get(kind) or 0.0) for kind in _SENTENCE}
    total = sum(sizes.values())
    if room_bytes is not None and 0 < total < _SMALL_SHARE * room_bytes:
        options = [*(() if choices.get("compile") in (None, "none") else ["compile=none"]), "a larger vram"]
        return f"the tensors of a step take only {size_text(total)} of it: try {' or '.join(options)}"
    # Without a measurement the order of _REMEDIES stands: sorting keeps it.
    order = sorted(_REMEDIES, key=lambda kind: -sizes[kind])
    offered: dict[str, str] = {}  # group -> option
    for group, option, worse in (remedy for kind in order for remedy in _REMEDIES[kind]):
        if len(offered) < _NUM_OFFERED and group not in offered:
            is_better = choices.get(group, _NEUTRAL[group]) in worse.split()
            if is_better and is_possible(group, option):
                offered[group] = option
    options = [f"{group}={option}" for group, option in offered.items()]
    advice = f"try {' or '.join(options)}" if options else "try a smaller model or a larger vram"
    if not total:
        return advice
    largest = max(sizes, key=lambda kind: sizes[kind])
    return f"{_SENTENCE[largest]} {100 * sizes[largest] / total:.0f} % of the peak: {advice}"


def data_wait_advice(data_wait_frac: float | None, choices: Mapping[str, str]) -> str | None:
    """A line when more than a tenth of the time was spent waiting for data, None otherwise."""
    if data_wait_frac is None or not data_wait_frac > _WORTH_SAYING or choices.get("loader") != "inline":
        return None
    return f"{100 * data_wait_frac:.0f} % of the time was spent waiting for data: try loader=workers"
