"""Silences libraries: what they warn or log while they are imported, and what they warn of in every step."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Inside it neither warnings nor log lines reach the user. torchao's import logs which of its CUDA extensions
    don't load, even if nothing needs them."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def accept_views() -> None:
    """Keep torch (2.13) from warning in every step that a model with shards returns a view, as transformers' GPT-2
    does. Its gradients would be wrong if somebody wrote into this output in place, which nothing here does."""
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor", UserWarning)
