"""Keeps libraries from waiting for Hugging Face's hub when it can't be reached."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lowvram.compat.replaced import replaced

ANSWER_WITHIN_S = 5.0


@contextmanager
def hf_offline() -> Iterator[None]:
    """Inside it libraries use only their caches if the hub can't be reached. By themselves they would retry for a
    minute.

    huggingface_hub.constants.HF_HUB_OFFLINE is patched, which libraries read at each look-up; the environment variable
    of that name is only read at import."""
    from huggingface_hub import constants

    with replaced(constants, "HF_HUB_OFFLINE", not is_reachable()):
        yield


def is_reachable() -> bool:
    """Whether the hub answers within `ANSWER_WITHIN_S`."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=ANSWER_WITHIN_S)
    except Exception:  # of any type: it depends on the HTTP library
        return False
    return True
