from __future__ import annotations

import numpy as np
import pytest
import torch

from lowvram.data.tokenizer import Bytes
from lowvram.data.windows import EvalWindows, TokenStream, TrainWindows, windowed

LENGTH = 8


def stream(num_bytes: int) -> TokenStream:
    """The bytes 0, 1, 2, …, so that a byte tells its place."""
    return TokenStream([np.arange(num_bytes, dtype=np.uint8)])


def test_pieces_read_as_one() -> None:
    text = np.frombuffer(b"no piece of this text is longer than another one", np.uint8)
    pieces = [text[:0], text[:3], text[3:4], text[4:4], text[4:30], text[30:], text[:0]]
    joined = TokenStream(pieces)
    assert len(joined) == len(text)
    for start in range(len(text)):
        for stop in range(start + 1, len(text) + 1):
            assert np.array_equal(joined.read(start, stop - start), text[start:stop])


def test_no_pieces_are_an_empty_stream() -> None:
    assert len(TokenStream([])) == 0


def test_a_target_is_the_byte_after_its_input() -> None:
    inputs, targets = TrainWindows(stream(100), LENGTH, seed=0).sample(3, epoch=1)
    assert inputs.shape == targets.shape == (LENGTH,)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)


@pytest.mark.parametrize("num_bytes", [LENGTH + 1, LENGTH + 2, 2 * LENGTH, 2 * LENGTH + 1, 100, 200])
def test_train_windows_differ_and_lie_in_the_text(num_bytes: int) -> None:
    windows = TrainWindows(stream(num_bytes), LENGTH, seed=0)
    for epoch in range(20):
        starts = {int(windows.sample(index, epoch)[0][0]) for index in range(len(windows))}
        assert len(starts) == len(windows) >= 1
        assert max(starts) <= num_bytes - LENGTH - 1


def test_an_epoch_moves_the_windows_and_the_seed_does_too() -> None:
    def starts(seed: int) -> list[int]:
        windows = TrainWindows(stream(200), LENGTH, seed)
        return [int(windows.sample(0, epoch)[0][0]) for epoch in range(10)]

    assert len(set(starts(0))) > 5
    assert starts(0) == starts(0)
    assert starts(0) != starts(1)


@pytest.mark.parametrize(("num_bytes", "limit"), [(LENGTH + 1, 5), (100, 3), (100, 12), (100, 1000), (200, 7)])
def test_eval_windows_never_overlap(num_bytes: int, limit: int) -> None:
    windows = EvalWindows(stream(num_bytes), LENGTH, limit)
    inputs = torch.cat([windows.sample(index, 0)[0] for index in range(len(windows))])
    assert len(windows) == min(limit, (num_bytes - 1) // LENGTH)
    assert len(inputs.unique()) == len(inputs) == len(windows) * LENGTH
    assert torch.equal(windows.sample(0, 0)[0], windows.sample(0, 5)[0])


def test_the_data_says_what_it_is() -> None:
    data = windowed(stream(200), stream(50), Bytes(), LENGTH, 3, 0, "numbers")
    assert (data.spec.num_classes, data.spec.shape) == (256, (LENGTH,))
    assert (len(data.train), len(data.eval)) == (24, 3)
    assert "numbers" in data.description
    assert "\n" not in data.description
