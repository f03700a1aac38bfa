"""The time that torch.compile takes, reported as a figure of its own; the time of steps doesn't include it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, final

from lowvram.compat.torch_compiler import compile_seconds
from lowvram.core.knob import is_compiled
from lowvram.loops.session import Session

T = TypeVar("T")
NO_KINDS = "compiled code would run eagerly under the ledger, which follows every operator"


def compile_fields(session: Session) -> dict[str, Any]:
    """The row's fields about compilation, after everything has run.

    Raises:
        RuntimeError: the model should have been compiled, but nothing was.
    """
    compile_s, is_wanted = compile_seconds(), is_compiled(session.knobs.values())
    if is_wanted and not compile_s:
        raise RuntimeError("nothing was compiled: is TORCH_COMPILE_DISABLE or TORCHDYNAMO_DISABLE set?")
    return {"compiled": is_wanted, "time": {"compile_s": compile_s or None}}


@final
class CompileTimes:
    """How long torch.compile worked in each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure the next step, which is run inside the block."""
        before = compile_seconds()
        yield
        self.seconds.append(compile_seconds() - before)

    def steady(self, first: int) -> list[int]:
        """The steps from `first` on in which nothing was compiled."""
        return [index for index, seconds in enumerate(self.seconds) if index >= first and not seconds]


def chosen(values: Sequence[T], steps: list[int]) -> list[T]:
    """The values of these steps."""
    return [values[index] for index in steps]
