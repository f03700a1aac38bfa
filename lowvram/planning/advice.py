"""One line of advice for a point that runs out of memory: the options whose `Knob.remedies` fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lowvram.config.registry import Option, all_options, knob_of, neutral_options
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob
from lowvram.results.row import size_text

_SENTENCE = {  # in the order in which kinds of equal or unknown size are considered
    Kind.ACTIVATIONS: "activations are",
    Kind.INPUTS: "inputs are",
    Kind.OPTIMIZER: "the optimizer's state is",
    Kind.PARAMETERS: "parameters are",
    Kind.GRADIENTS: "gradients are",
    Kind.OTHER: "other memory is",
}
_NUM_OFFERED = 2
_SMALL_SHARE = 0.5  # of the limit: if the tensors of a step take less, other memory filled it


def out_of_memory_advice(
    by_kind: Mapping[str, float] | None,
    in_use: Mapping[str, Knob],
    is_possible: Callable[[str, str], bool] = lambda group, option: True,
    room_bytes: int | None = None,
) -> str:
    """What to try next, given the bytes of each kind at the peak and the knobs in use, by group.

    Args:
        is_possible: whether an option can take the place of the one in use in its group.
        room_bytes: the memory limit of the point, if it had one.

    >>> out_of_memory_advice({"activations": 71, "parameters": 29}, {"ckpt": KeepAll(), "accum": Whole()})
    'activations are 71 % of the peak: try ckpt=every1 or accum=x8'
    """
    sizes = {kind: float((by_kind or {}).get(kind.value) or 0.0) for kind in _SENTENCE}
    total = sum(sizes.values())
    if room_bytes is not None and 0 < total < _SMALL_SHARE * room_bytes:
        neutral = [f"{group}={neutral_options()[group]}" for group, knob in in_use.items() if knob.extra_memory]
        options = [*neutral, "a larger vram"]
        return f"the tensors of a step take only {size_text(total)} of it: try {' or '.join(options)}"
    order = sorted(sizes, key=lambda kind: -sizes[kind])
    offered: dict[str, str] = {}  # group -> option
    for group, option in (remedy for kind in order for remedy in remedies_against(kind)):
        if len(offered) < _NUM_OFFERED and group in in_use and group not in offered:
            is_better = knob_of((group, option)).improves_on(in_use[group])
            if is_better and is_possible(group, option):
                offered[group] = option
    options = [f"{group}={option}" for group, option in offered.items()]
    advice = f"try {' or '.join(options)}" if options else "try a smaller model or a larger vram"
    if not total:
        return advice
    return f"{_SENTENCE[order[0]]} {100 * sizes[order[0]] / total:.0f} % of the peak: {advice}"


def remedies_against(kind: Kind) -> Sequence[Option]:
    """The options that reduce a kind of memory, in the order in which they are offered."""
    priorities = {option: knob_of(option).remedies().get(kind) for option in all_options()}
    remedies = (option for option, priority in priorities.items() if priority is not None)
    return sorted(remedies, key=lambda option: priorities[option] or 0)
