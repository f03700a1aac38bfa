"""How a point can end in its own process, and the status and reason that its row gets."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from lowvram.config.defaults import PACKAGE
from lowvram.config.errors import BadInput, BadSample, Incompatible, Shortage
from lowvram.config.secret import text_without_secrets
from lowvram.config.texts import LONGEST_REASON, message, shortened
from lowvram.core.troubles import chain, disk_trouble, is_out_of_memory, thread_trouble
from lowvram.loops.session import Interrupted, NonFinite
from lowvram.results.files.manifest import InTheWay
from lowvram.worker.rendezvous import PeerLost

IN_A_WORKER = re.compile(r"Caught (\w+) in DataLoader worker process \d+\.\nOriginal Traceback")
OURS = f"{PACKAGE}/"
OF_GLOO = ("/gloo/", "caused pair closure")  # in what it says when it can't reach another rank
COMPILERS_FILES = ("/torch/_dynamo/convert_frame.py", "/torch/_inductor/compile_fx.py")
SAVING = ("saving a snapshot", "saving the weights", "saving what the teacher says")
PHASES = {  # by function name: the innermost of these functions of lowvram on the stack gives the phase
    "update": "the update",
    "backward": "the backward pass",
    "one_after_another": "the forward pass",
    "evaluate": "the evaluation",
    "log": "writing the log",
    "save": SAVING[0],
    "export": SAVING[1],
    "write_shard": SAVING[2],
    "write_index": SAVING[2],
    "materialise": "building the model",
}


def ending(error: BaseException) -> dict[str, Any]:
    """Status and reason of a point that ended with `error`."""
    end = full_ending(error)
    return end | {"reason": shortened(text_without_secrets(end["reason"]), LONGEST_REASON)}


def full_ending(error: BaseException) -> dict[str, Any]:
    """The same, however long the reason is."""
    text = message(error)
    if isinstance(error, BadInput | Incompatible):
        return {"status": "incompatible", "reason": text}
    if isinstance(error, Interrupted):
        return {"status": "interrupted", "reason": text or f"stopped in {phase(error.__traceback__)}"}
    if isinstance(error, NonFinite):
        return {"status": "nonfinite", "reason": text}
    if isinstance(error, BadSample | Shortage):
        return {"status": "error", "reason": (in_a_worker(text) or text).removeprefix(f"{type(error).__name__}: ")}
    if is_out_of_memory(error):
        return {"status": "oom", "reason": f"out of memory in {phase(error.__traceback__)}{asked(text)}"}
    if trouble := thread_trouble(error):
        return {"status": "error", "reason": f"{trouble}, in {phase(error.__traceback__)}"}
    if isinstance(error, SystemExit):
        return {"status": "error", "reason": f"the program called sys.exit({error.code!r})"}
    if isinstance(error, InTheWay):
        return {"status": "error", "reason": text}
    if trouble := disk_trouble(error):
        where = f": {error.filename}" if isinstance(error, OSError) and error.filename else ""
        return {"status": "error", "reason": f"{trouble}, in {phase(error.__traceback__)}{where}"}
    return {"status": "error", "reason": in_a_worker(text) or f"{type(error).__name__}: {first_line(text)}"}


def first_line(text: str) -> str:
    return next(iter(text.splitlines()), "") or "no message"


def in_a_worker(text: str) -> str | None:
    """The error of a loader's worker, taken from a message that ends with the worker's own traceback."""
    match = IN_A_WORKER.match(text)
    if match is None:
        return None
    name = match[1]
    lines = re.findall(rf"^(?:[\w.]+\.)?{name}(?:: (.*))?$", text, re.MULTILINE)
    return f"{name}: {(lines or [''])[-1] or 'no message'} (in a worker of the loader)"


def says_all(error: BaseException, folder: str) -> bool:
    """Whether the reason says enough without a traceback: a sample can't be used, the machine lacks something, or a
    file of the run itself, in `folder`, can't be written."""
    if isinstance(error, InTheWay | BadSample | Shortage) or thread_trouble(error):
        return True
    name = error.filename if isinstance(error, OSError) else None
    is_ours = isinstance(name, str) and Path(name).is_relative_to(folder)
    return disk_trouble(error) is not None and (is_ours or phase(error.__traceback__) in SAVING)


def is_of_a_peer(error: BaseException) -> bool:
    """Whether a rank failed only because another one had ended or hung."""
    return any(
        isinstance(cause, PeerLost | dist.DistError) or any(sign in message(cause) for sign in OF_GLOO)
        for cause in chain(error)
    )


def phase(trace: TracebackType | None) -> str:
    """The phase of the run in which an error was raised. Read from the traceback, so that steps needn't track it."""
    phase_name = "the set-up"
    for frame, _ in traceback.walk_tb(trace):
        if frame.f_code.co_filename.endswith(COMPILERS_FILES):
            return "compiling, which takes memory of its own"
        if frame.f_code.co_filename.startswith(OURS):
            phase_name = PHASES.get(frame.f_code.co_name, phase_name)
    return phase_name


def asked(text: str) -> str:
    """The size that was asked for, from the allocator's message."""
    if match := re.search(r"allocate (\d+) bytes", text):
        return f", asking for {int(match[1]) / 2**20:.1f} MiB more"
    if match := re.search(r"Tried to allocate ([\d.]+ [KMG]iB)", text):
        return f", asking for {match[1]} more"
    return ""
