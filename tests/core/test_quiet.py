"""Silence around imports that talk."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings

import pytest

from lowvram.core.quiet import quiet


def test_nothing_is_heard_inside_and_all_afterwards(caplog: pytest.LogCaptureFixture) -> None:
    with quiet():
        warnings.warn("inside", stacklevel=1)
        logging.getLogger("inside").error("inside")
    assert not caplog.records
    logging.getLogger("after").error("after")
    assert [record.message for record in caplog.records] == ["after"]
    with pytest.warns(UserWarning, match="after"):
        warnings.warn("after", stacklevel=1)


def test_an_error_ends_the_silence() -> None:
    with pytest.raises(ZeroDivisionError), quiet():
        _ = 1 / 0
    assert logging.root.manager.disable == logging.NOTSET


@pytest.mark.slow
def test_torchao_is_imported_without_a_word() -> None:
    program = (
        "from torch import nn, ones; from lowvram.knobs.optimizer import AdamW8bit;"
        "AdamW8bit().make([nn.Parameter(ones(2))]);"
        "from lowvram.knobs.precision.fp8 import convert; convert(nn.Sequential(nn.Linear(16, 16)), ())"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
