"""The laws hold for every model of lowvram's own, since the laboratory has each of them."""

from __future__ import annotations

from lowvram.config.registry import node_of, options_of
from lowvram.config.schema import find_target
from lowvram.models.builtin import OwnModel
from tests.laboratory import LARGER, MODELS, PROBLEMS, WITH_DROPOUT


def test_every_model_is_in_the_laboratory() -> None:
    classes = {find_target("model", node_of("model", option)["_target_"]) for option in options_of("model")}
    missing = {cls for cls in classes if issubclass(cls, OwnModel)} - {type(PROBLEMS[name].model) for name in MODELS}
    assert not missing, "add a tiny one to PROBLEMS and a larger one to LARGER, under one name (tests/laboratory.py)"
    assert all(type(LARGER[name].model) is type(PROBLEMS[name].model) for name in MODELS)
    assert "transformer_dropout" in WITH_DROPOUT
