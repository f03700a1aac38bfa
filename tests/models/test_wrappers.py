"""Wrappers of torch around a model, and the names that they add."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from lowvram.core.assemble import assemble
from lowvram.core.values import own_tensors
from lowvram.loops.export import plain
from lowvram.models import layout
from lowvram.models.external import ExternalConfig
from lowvram.models.wrappers import plain_names
from lowvram.tasks import Auto
from tests.laboratory import CPU, PROBLEMS, TRANSFORMER, knobs_of
from tests.models.test_external import HERE, WORDS, Speaker


def compiled(vocab_size: int) -> nn.Module:
    return torch.compile(Speaker(vocab_size))  # pyright: ignore[reportReturnType]


def parallel(vocab_size: int) -> nn.Module:
    return nn.DataParallel(torch.compile(Speaker(vocab_size)))  # pyright: ignore[reportArgumentType]


def with_compiled_blocks(vocab_size: int) -> nn.Module:
    model = Speaker(vocab_size)
    for number, layer in enumerate(model.encoder.layers):
        model.encoder.layers[number] = torch.compile(layer)  # pyright: ignore[reportArgumentType]
    return model


@pytest.mark.parametrize(
    ("saved", "wanted", "renamed"),
    [
        (["module.a", "module.b"], ["a", "b"], {"module.a": "a", "module.b": "b"}),
        (["module._orig_mod.a"], ["a"], {"module._orig_mod.a": "a"}),
        (["h.0._orig_mod.a", "b"], ["h.0.a", "b"], {"h.0._orig_mod.a": "h.0.a"}),
        (["module.a"], ["module.a"], {}),  # the model's own name
        (["_orig_mod.module.a"], ["module.a"], {"_orig_mod.module.a": "module.a"}),
        (["modules.a", "my_module.b"], ["a"], {}),
        (["module.a", "a"], ["a"], {}),  # which one is meant isn't known
    ],
)
def test_added_parts_of_names_are_found(saved: list[str], wanted: list[str], renamed: dict[str, str]) -> None:
    assert plain_names(saved, wanted) == renamed


@pytest.mark.parametrize("maker", [compiled, parallel, with_compiled_blocks])
def test_a_wrapped_model_is_trained_and_saved_without_its_wrapper(
    maker: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"{__name__}.{getattr(maker, '__name__', '')}"
    config = ExternalConfig(name, {"vocab_size": "data.vocab_size"})
    model = assemble(Auto().pose(config, WORDS), knobs_of(), CPU).model
    assert type(model) is Speaker
    assert f"model.target={name}: what " in capsys.readouterr().out
    assert not any("_orig_mod" in inner for inner, _ in model.named_parameters())
    config.save(model, WORDS, tmp_path)
    loaded = plain.load(tmp_path, plain.Allowed(None, {name}))
    assert all(torch.equal(model.state_dict()[inner], each) for inner, each in loaded.state_dict().items())


def test_weights_under_added_names_are_loaded_and_stay_tied(tmp_path: Path) -> None:
    config = ExternalConfig(f"{HERE}.Speaker", {"vocab_size": 11})
    saved, model = config.build(WORDS), config.build(WORDS)
    layout.save(saved, config, WORDS, tmp_path)
    tensors = load_file(tmp_path / layout.WEIGHTS)
    save_file({f"_orig_mod.{name}": each for name, each in tensors.items()}, tmp_path / layout.WEIGHTS)
    layout.load(model, tmp_path / layout.WEIGHTS)
    assert all(torch.equal(saved.state_dict()[name], each) for name, each in model.state_dict().items())
    tied = {id(each) for module in model.modules() for _, each in own_tensors(module)}
    assert len(tied) == len([*saved.parameters()])


def test_model_init_reads_added_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = PROBLEMS["transformer"]
    model = assemble(task, knobs_of(), CPU, seed=3).model
    layout.save(model, TRANSFORMER, task.spec, tmp_path)
    with safe_open(tmp_path / layout.WEIGHTS, "pt") as file:
        about = {f"module.{name}": f"module.{kept}" for name, kept in file.metadata().items()}
    tensors = load_file(tmp_path / layout.WEIGHTS)
    save_file({f"module.{name}": each for name, each in tensors.items()}, tmp_path / layout.WEIGHTS, about)
    fill = type(TRANSFORMER)(**{**vars(TRANSFORMER), "init": str(tmp_path)}).values(model, task.spec, 0)
    for name, parameter in model.named_parameters():
        found = torch.empty_like(parameter.detach())
        fill(name, found)
        assert torch.equal(found, parameter), name
    assert "names of" in capsys.readouterr().out
