"""Folders of models that somebody has forged: one sentence each, at once, whatever is in them."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest

from lowvram.cli.initial import with_initial
from lowvram.config.errors import BadInput
from lowvram.loops.export.folder import load
from tests.loops.export.test_folder import exported

VALUES = (None, [], {}, "x", -1, 10**9, 1e300, True, [[]], {"a": {}}, "9" * 5000, ["tokens"])


def forged(chosen: random.Random, described: dict[str, Any]) -> str:
    """The text of a configuration in which something is wrong."""
    if chosen.random() < 0.2:
        return chosen.choice(
            ("", "[]", "null", "{", "[" * 100_000, '{"data": 1}', '{"model": {}, "data": {}}', "\udcff")
        )
    part = chosen.choice(list(described))
    inner = described[part]
    if chosen.random() < 0.2 or not isinstance(inner, dict):
        described[part] = chosen.choice(VALUES)
    else:
        inner[chosen.choice(list(inner))] = chosen.choice(VALUES)
    return json.dumps(described)


@pytest.mark.parametrize("seed", range(40))
def test_a_forged_model(tmp_path: Path, seed: int) -> None:
    """Loading it and training on from it end in a sentence, or it is a model after all."""
    chosen = random.Random(20261127 + seed)
    exported(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_bytes(forged(chosen, json.loads(file.read_text())).encode(errors="surrogateescape"))
    if chosen.random() < 0.3:
        weights = tmp_path / "model" / "model.safetensors"
        weights.write_bytes(chosen.choice((b"", b"x" * 100, weights.read_bytes()[:-9], b"\xff" * 8 + b"{}")))
    (tmp_path / "model" / "files.json").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for use in (lambda: load(tmp_path / "model"), lambda: with_initial([f"model.init={tmp_path}/model"])):
            try:
                use()
            except BadInput as error:
                assert "\n" not in str(error)  # noqa: PT017


def test_more_layers_than_weights(tmp_path: Path) -> None:
    exported(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    described = json.loads(file.read_text())
    (tmp_path / "model" / "files.json").unlink()
    for name, value in (("num_layers", 10**9), ("layers", [10**8] * 4), ("num_hidden_layers", 2**40)):
        file.write_text(json.dumps({**described, "model": {**described["model"], name: value}}))
        with (
            pytest.warns(UserWarning, match="files.json is missing"),
            pytest.raises(BadInput, match=rf"sizes fit its weights: {name} is "),
        ):
            load(tmp_path / "model")
