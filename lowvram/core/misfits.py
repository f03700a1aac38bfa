"""Errors of torch in a step that a knob causes where the model's code doesn't fit it: refusals that name the knob."""

from __future__ import annotations

import dis
import re
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from lowvram.config.errors import Incompatible
from lowvram.config.texts import brief
from lowvram.core.troubles import is_out_of_memory

if TYPE_CHECKING:
    from torch import Tensor

    from lowvram.core.knob import Knob
    from lowvram.core.rig import Part, Rig, Run

# For knobs whose backward pass is a function of lowvram's own.
ONCE: Mapping[str, str] = {
    "trying to differentiate twice": "gradients aren't differentiated again, as those of an energy's forces are: leave"
    " it at its neutral option",
}
# For knobs that compute blocks again. In the first steps core/witness.py compares more, and names the block.
AGAIN: Mapping[str, str] = {
    r"torch\.utils\.checkpoint: (?:A different number|trying to save more|Recomputed values)": "blocks compute the same"
    " when they are computed again in the backward pass, which a counter in a closure or a generator in another Python"
    " file may prevent: choose ckpt=none",
}
# For knobs with which only some of the model's weights train.
TAKES_PART: Mapping[str, str] = {
    "does not require grad": "weights that train take part in the loss of every step: let the model leave no blocks"
    " out, or choose adapter=none (if that fails alike, the model's own code detaches its loss)",
}
# The number formats that knobs leave as they are, and fp32, as torch names them.
NAMED = r"\b(?:CPU|CUDA)?(?i:(?:(?:complex)?double|complexfloat|long|int|short|char|byte|bool)(?:Tensor|Type)?)\b"
OTHERS = rf"(?:{NAMED}|complex<(?:float|double)\b)"
SINGLE = r"(?<!complex<)\b(?:CPU|CUDA)?(?i:float(?:Tensor|Type)?)\b"


def of_format(name: str) -> str:
    """A pattern of torch's errors where numbers in a knob's format meet fp32, or an operator lacks that format. Not
    where they meet integers or fp64: there fp32 would fail, too.

    Args:
        name: BFloat16 or Half.
    """
    return rf"(?s:\A(?!(?=.*{OTHERS})(?!.*{SINGLE})).*{name}(?:Tensor|Type)?\b)"


def with_reasons(run: Run, knobs: Mapping[str, Knob]) -> Run:
    """A `Rig.run` that raises Incompatible where one of the knobs knows why torch fails (`Knob.misfits`)."""
    return partial(_run, run, knobs) if any(knob.misfits for knob in knobs.values()) else run


def _run(run: Run, knobs: Mapping[str, Knob], rig: Rig, parts: list[Part], total: Tensor) -> Tensor:
    try:
        return run(rig, parts, total)
    except RuntimeError as error:
        if is_out_of_memory(error) or not is_of_torch(error):
            raise
        words = str(error)
        for name, knob in knobs.items():
            for pattern, need in knob.misfits.items():
                if re.search(pattern, words):
                    raise Incompatible(f"{name} needs that {need} (torch: {brief(words)})") from error
        raise


def is_of_torch(error: BaseException) -> bool:
    """Whether an error that was caught is raised by torch, and not by a `raise` in the model's own code."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] == "torch":
        return True
    return trace.tb_frame.f_code.co_code[trace.tb_lasti] != dis.opmap["RAISE_VARARGS"]
