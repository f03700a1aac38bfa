"""The hub of Hugging Face, and whether it can be reached from here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

ANSWER_WITHIN_S = 5.0


@contextmanager
def hf_offline() -> Iterator[None]:
    """Libraries that ask the hub inside look into their caches alone where it can't be reached. By themselves they try
    for a minute."""
    from huggingface_hub import constants

    with patch.object(constants, "HF_HUB_OFFLINE", not is_reachable()):
        yield


def is_reachable() -> bool:
    """Whether the hub answers at all, within seconds."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=ANSWER_WITHIN_S)
    except Exception:  # of whatever library it is that sends the request
        return False
    return True
