"""Private names of torch.cuda, as far as they can be seen without a card."""

from __future__ import annotations

import inspect
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.compat.sentences import needed

SNAPSHOT: dict[str, Any] = {
    "segments": [],
    "device_traces": [[{"action": "alloc", "addr": 512, "size": 1024, "stream": 0, "frames": []}]],
}


@needed("torch.cuda.memory._record_memory_history", by="debug=memory on a card")
def test_recording_is_switched_on_and_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowvram.compat.torch_cuda import allocator_recorded

    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(torch._C, "_cuda_record_memory_history", lambda *args: calls.append(args), raising=False)
    with allocator_recorded(context=None, max_entries=5):
        assert [call[:2] for call in calls] == [("all", None)]
        assert 5 in calls[0]
    assert [call[0] for call in calls] == ["all", None]


@needed("torch.cuda.memory._snapshot", by="debug=memory on a card")
def test_a_snapshot_is_what_the_allocator_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowvram.compat.torch_cuda import allocator_snapshot

    monkeypatch.setattr(torch._C, "_cuda_memorySnapshot", lambda *_: SNAPSHOT, raising=False)
    assert allocator_snapshot() == SNAPSHOT


@needed("torch.cuda.memory._dump_snapshot", by="debug=memory on a card")
def test_a_snapshot_is_written_for_the_viewer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from lowvram.compat.torch_cuda import save_allocator_snapshot

    monkeypatch.setattr(torch._C, "_cuda_memorySnapshot", lambda *_: SNAPSHOT, raising=False)
    save_allocator_snapshot(tmp_path / "snapshot.pickle")
    assert pickle.loads((tmp_path / "snapshot.pickle").read_bytes()) == SNAPSHOT


@needed("torch._C._cuda_getCurrentRawStream", by="stepping.sums=int8 on a card")
def test_a_stream_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowvram.compat.torch_cuda import stream_handle

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", {1: 0xCAFE}.__getitem__, raising=False)
    assert stream_handle(1) == 0xCAFE


@needed("torch.cuda._memory_viz.trace_plot", by="debug=memory on a card")
def test_a_page_shows_a_snapshot() -> None:
    from lowvram.compat.torch_cuda import allocator_page

    assert "<script" in allocator_page(SNAPSHOT)


@needed("torch.cuda._get_pynvml_handler", by="the notice that others use the card")
def test_a_card_is_found_among_the_visible_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowvram.compat.torch_cuda import nvml_handle

    nvml = SimpleNamespace(
        NVMLError_DriverNotLoaded=OSError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: f"card {index}",
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "pynvml", nvml, raising=False)
    monkeypatch.setattr(torch.cuda, "_HAS_PYNVML", True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert [nvml_handle(index) for index in (0, 1)] == ["card 3", "card 1"]


@needed("torch.cuda._is_in_bad_fork", by="the fork server")
def test_this_process_is_no_bad_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowvram.compat.torch_cuda import is_in_bad_fork

    assert is_in_bad_fork() is False
    assert "_is_in_bad_fork()" in inspect.getsource(torch.cuda.is_initialized)  # it still means the same


@needed("torch.cuda.Stream and torch.Tensor.record_stream", by="a plan for a card of offload=activations")
def test_streams_are_replaced_for_a_while() -> None:
    from lowvram.compat.torch_cuda import streams_replaced

    before = torch.cuda.Stream
    with streams_replaced({"Stream": str, "current_stream": lambda device=None: "stream"}):
        assert torch.cuda.Stream is str
        assert torch.cuda.current_stream() == "stream"
        torch.ones(1).record_stream("stream")  # pyright: ignore
    assert torch.cuda.Stream is before
    with pytest.raises((TypeError, RuntimeError)):
        torch.ones(1).record_stream("stream")  # pyright: ignore
