"""The hub of Hugging Face, out of reach."""

from __future__ import annotations

import pytest

from tests.compat.sentences import needed


@needed("huggingface_hub.constants.HF_HUB_OFFLINE", by="whoever names a model or data of the hub")
def test_libraries_ask_nobody_where_the_hub_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    from lowvram.compat import hf_offline

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hf_offline, "is_reachable", lambda: False)
    with hf_offline.hf_offline():
        assert constants.is_offline_mode()
        with pytest.raises(LocalEntryNotFoundError):
            hf_hub_download("lowvram/nothing", "config.json")
    assert not constants.is_offline_mode()


@needed("huggingface_hub.get_session", by="whoever names a model or data of the hub")
def test_a_hub_that_does_not_answer_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    from lowvram.compat.hf_offline import is_reachable

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert not is_reachable()
