"""What a test of a private name says."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from tests.compat.sentences import needed


def test_a_name_that_is_gone_is_reported_in_one_sentence() -> None:
    @needed("torch._gone", by="the step")
    def test() -> None:
        import torch

        torch._gone  # noqa: B018  # pyright: ignore

    with pytest.raises(pytest.fail.Exception) as failure:
        test()
    begins = (
        f"torch._gone is gone or does something else in torch {version('torch')}: the step needs it, see lowvram/comp"
    )
    assert str(failure.value).startswith(begins)
    assert "has no attribute '_gone'" in str(failure.value)
    assert "\n" not in str(failure.value)


def test_a_name_that_does_something_else_is_reported_alike() -> None:
    @needed("torch.add", by="whoever adds")
    def test() -> None:
        raise AssertionError("assert 2 == 3\n where 2 = add(1, 1)")

    with pytest.raises(pytest.fail.Exception, match=r"whoever adds needs it.*\(AssertionError: assert 2 == 3 where 2"):
        test()


def test_a_skip_stays_one() -> None:
    @needed("torch.add", by="whoever adds")
    def test() -> None:
        pytest.skip("no CUDA device")

    with pytest.raises(pytest.skip.Exception):
        test()
