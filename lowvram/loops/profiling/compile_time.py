"""When torch.compile is at work: that time is a figure of its own, and no step's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, final

from lowvram.compat.torch_compiler import compile_seconds
from lowvram.core.knob import Fact
from lowvram.loops.session import Session

T = TypeVar("T")
NO_KINDS = "compiled code would run eagerly under the ledger, which follows every operation"


def is_compiled(session: Session) -> bool:
    """Whether the choices of a session compile its model."""
    return not any(Fact.COMPILED in knob.breaks() for knob in session.knobs.values())


def compile_fields(session: Session) -> dict[str, Any]:
    """What the row says of compilation, after everything has run.

    Raises:
        RuntimeError: the model was to be compiled, and nothing was.
    """
    compile_s = compile_seconds()
    if is_compiled(session) and not compile_s:
        raise RuntimeError("nothing was compiled: is TORCH_COMPILE_DISABLE or TORCHDYNAMO_DISABLE set?")
    return {"compiled": is_compiled(session), "time": {"compile_s": compile_s or None}}


@final
class CompileTimes:
    """How long torch.compile has worked in each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """The block is the next step."""
        before = compile_seconds()
        yield
        self.seconds.append(compile_seconds() - before)

    def steady(self, first: int) -> list[int]:
        """The steps from `first` on in which nothing was compiled."""
        return [index for index, seconds in enumerate(self.seconds) if index >= first and not seconds]


def chosen(values: Sequence[T], steps: list[int]) -> list[T]:
    """The values of these steps."""
    return [values[index] for index in steps]
