"""Models to follow, and files to read, for every test of the data."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lowvram.data.spec import Modality, TextRules


@dataclass(frozen=True)
class FakeModel:
    """What a source may know of a model's configuration."""

    modality: Modality | None
    shape: tuple[int, ...]
    vocab_size: int | None = None
    num_classes: int | None = None
    text_rules: TextRules = field(default_factory=TextRules)

    def reading(self, modality: Modality) -> FakeModel:
        """Itself."""
        return self

    def natural_shape(self) -> tuple[int, ...]:
        return self.shape

    def check_packed(self) -> None: ...


@pytest.fixture
def token_model() -> Callable[..., FakeModel]:
    """Makes a model of 32 tokens; keywords pin its number of classes."""
    return lambda **pinned: FakeModel(Modality.TOKENS, (32,), **pinned)


@pytest.fixture
def classifier_of_texts() -> Callable[..., FakeModel]:
    """Makes a model of texts of 32 tokens with a class; keywords pin its numbers and say what it asks of texts."""
    return lambda **pinned: FakeModel(Modality.LABELLED_TOKENS, (32,), **pinned)


@pytest.fixture
def image_model() -> Callable[..., FakeModel]:
    """Makes a model of 24x24 pixels; keywords pin its number of classes."""
    return lambda **pinned: FakeModel(Modality.IMAGES, (3, 24, 24), **pinned)


@pytest.fixture
def datasets_offline(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """datasets with a cache of its own, on a machine that can't reach another."""
    import datasets.config

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was touched")

    cache = tmp_path_factory.mktemp("datasets_cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return cache
