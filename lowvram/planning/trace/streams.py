"""Streams on paper: nothing runs on them, but a trace knows on which of them memory was asked for. torch's allocator
gives what one stream has freed to that stream alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, final

from lowvram.compat.torch_cuda import streams_replaced


class FakeEvent:
    """An event of a stream; `query` says that all before it is finished."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: FakeStream | None = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class FakeStream(FakeEvent):
    """A stream, known by its number. The default one has the number 0."""

    def __init__(self, *_: Any, number: int = 0, **__: Any) -> None:
        self.number = number

    def wait_stream(self, other: FakeStream) -> None: ...

    def wait_event(self, event: FakeEvent) -> None: ...

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        return event or FakeEvent()


@final
class Streams:
    """The streams of one trace."""

    def __init__(self) -> None:
        self.current = FakeStream()
        self.num_made = 0

    def next_number(self) -> int:
        self.num_made += 1
        return self.num_made

    @contextmanager
    def use(self, stream: FakeStream | None) -> Iterator[None]:
        before = self.current
        self.current = stream or before
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def replacing_torchs(self) -> Iterator[None]:
        """Inside it these take the place of a card's streams, and of the CPU's, which FSDP uses on paper."""
        next_number = self.next_number

        class MadeStream(FakeStream):  # a class, as code that is imported meanwhile may write `Stream | None`
            def __init__(self, *_: Any, **__: Any) -> None:
                super().__init__(number=next_number())

        names: dict[str, Any] = {
            "Stream": MadeStream,
            "Event": FakeEvent,
            "current_stream": lambda device=None: self.current,
            "stream": self.use,
        }
        with ExitStack() as undo:
            undo.enter_context(streams_replaced(names))
            yield
