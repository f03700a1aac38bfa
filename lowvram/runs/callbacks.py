"""callbacks: objects of the user's own that are told what happens in a run. Imports no torch.

They run in the parent, as the loggers do: they get plain values, also of a point whose process has died, and can change
neither the training nor its measurements.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any, final

from lowvram.config.errors import BadInput
from lowvram.config.importing import import_object
from lowvram.config.secret import text_without_secrets
from lowvram.config.texts import first_line

KEY = "callbacks"


def check_callbacks(targets: Sequence[str]) -> None:
    """Import what the user has named. Raises BadInput if there is no such class or function, or its module fails."""
    for target in targets:
        try:
            import_object(target, KEY)
        except BadInput:
            raise
        except BaseException as error:  # no signal raises one here: cli/start.py
            allowed = f"importable: its module raises {type(error).__name__}: {first_line(error)}"
            raise BadInput(KEY, target, allowed) from error


@final
class Callbacks:
    """The callbacks of one run. Each is made without arguments and may have any of these methods:

    begin(config: dict, step: int)      steps begin after `step`: again when the run goes on in a new process
    step(step: int, values: dict)       a step was logged (train.log_every); values are as in metrics.jsonl
    evaluation(step: int, values: dict) an evaluation has ended
    snapshot(step: int, path: Path)     a snapshot was saved
    end(row: dict)                      the run has ended, however it did; the row is that of result.json

    One that raises is told in one sentence and not called again.
    """

    def __init__(self, targets: Sequence[str], say: Callable[[str], None]) -> None:
        self._say, self._made = say, dict[str, Any]()
        for target in targets:
            self._try(target, "__init__", self._make, target)

    def _make(self, target: str) -> None:
        self._made[target] = import_object(target, KEY)()

    def begin(self, config: Mapping[str, Any], step: int) -> None:
        self._tell("begin", config, step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._tell("evaluation" if "loss/eval" in values else "step", step, values)

    def snapshot(self, step: int, path: str) -> None:
        self._tell("snapshot", step, Path(path))

    def end(self, row: Mapping[str, Any]) -> None:
        self._tell("end", row)

    def _tell(self, moment: str, *values: Any) -> None:
        for target, callback in list(self._made.items()):
            method = getattr(callback, moment, None)
            if method is not None:
                self._try(target, moment, method, *deepcopy(values))

    def _try(self, target: str, moment: str, action: Callable[..., None], *values: Any) -> None:
        try:
            with switches_kept():
                action(*values)
        except BaseException as error:  # whatever it is, the run goes on
            self._made.pop(target, None)
            first = (str(error).splitlines() or [""])[0]
            told = text_without_secrets(f"{type(error).__name__}: {first}")
            self._say(f"the callback {target} failed in `{moment}` and is not called again: {told}")


def switches_kept() -> AbstractContextManager[None]:
    """Around a callback: with process=inline the training runs in this process, too, and an autocast that the callback
    leaves on mustn't go on there."""
    if "torch" not in sys.modules:
        return nullcontext()
    from lowvram.compat.torch_autocast import same_autocast

    return same_autocast()
