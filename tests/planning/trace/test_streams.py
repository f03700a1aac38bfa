"""On which stream memory is asked for."""

from __future__ import annotations

from typing import Any

import torch

from lowvram.core.device import Card
from lowvram.core.row_shape import RowShape
from lowvram.planning.target import Target
from lowvram.planning.trace.streams import FakeEvent, Streams
from lowvram.planning.trace.tracer import trace
from tests.laboratory import PROBLEMS, knobs_of

A100 = Card("A100", (8, 0))


def test_the_innermost_stream_is_the_current_one() -> None:
    streams = Streams()
    with streams.replacing_torchs():
        one: Any = torch.cuda.Stream()
        other: Any = torch.cpu.Stream(priority=-1)
        assert torch.cuda.current_stream() is torch.cpu.current_stream()
        with torch.cuda.stream(one):
            assert streams.current is one
            with torch.cpu.stream(other), torch.cuda.stream(None):
                assert torch.cuda.current_stream() is other
            assert streams.current is one
        one.wait_stream(other)
        event = other.record_event()
        one.wait_event(event)
        assert isinstance(torch.cuda.Event(), FakeEvent)
        assert event.query()
    assert (streams.current.number, streams.num_made) == (0, 2)


def test_code_that_is_imported_meanwhile_may_name_the_class() -> None:
    """peft imports more of transformers when a model gets adapters."""
    with Streams().replacing_torchs():
        annotation: Any = eval("torch.cuda.Stream | torch.cuda.Event | None")
        assert isinstance(torch.cuda.Stream(), annotation)


def streams_of(sharding: str) -> list[set[int]]:
    """The streams of what is asked for, and of what is given back."""
    target = Target(A100, 2, RowShape())
    requests = trace(PROBLEMS["transformer"], knobs_of(sharding=sharding), 8, target).requests()
    by_storage = {storage: stream for storage, num_bytes, stream in requests if num_bytes > 0}
    assert all(by_storage[storage] == stream for storage, _, stream in requests)
    return [{stream for _, num_bytes, stream in requests if (num_bytes > 0) is asked} for asked in (True, False)]


def test_shards_are_gathered_and_summed_on_streams_of_their_own() -> None:
    """FSDP2's: what it gathers is made where it is copied in, sums where they are added up."""
    assert streams_of("ddp") == [{0}, {0}]
    asked, given_back = streams_of("fsdp")
    assert len(asked) == len(given_back) == 3
