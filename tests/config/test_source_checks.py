"""What the program tells of a configuration without importing torch is what the point's process would tell."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from lowvram.cli import job_process
from lowvram.config import source_checks
from lowvram.config.errors import BadInput
from lowvram.config.registry import node_of, options_of
from lowvram.config.schema import build, described_type, find_target
from lowvram.config.settings import GROUPS
from lowvram.config.source_checks import PATHS, LeftToChild, check_values, class_at, source_of
from tests.calls import ROOT, TINY, Outcome

OPTIONS = [(group, option) for group in GROUPS for option in options_of(group)]


@pytest.mark.parametrize("group", GROUPS)
def test_the_fields_of_every_option_are_read(group: str) -> None:
    for option in options_of(group):
        target = node_of(group, option)["_target_"]
        real, read = find_target(group, target), class_at(target)
        assert read is not None, option
        assert read is not real
        names = [field.name for field in dataclasses.fields(real)]
        assert [field.name for field in dataclasses.fields(read)] == names
        assert [described_type(read, name) for name in names] == [described_type(real, name) for name in names]
        assert ("__post_init__" in dir(read)) == ("__post_init__" in dir(real))


WRONG = (  # group, option, values
    ("data", "text", {}),
    ("data", "text", {"path": "/nope"}),
    ("data", "imagefolder", {"path": "/nope"}),
    ("data", "hub", {"name": "./nope.csv"}),
    ("data", "hub", {"name": "/nope", "samples": "sentences"}),
    ("data", "chat", {"name": "./nope.jsonl"}),
    ("data", "pairs", {"name": "./nope.csv", "text": "a", "target": "b"}),
    ("data", "synthetic", {"sequence_length": 0}),
    ("model", "hf", {"name": "./nope"}),
    ("model", "hf", {"name": "gpt2", "dropout": 2}),
    ("model", "transformer", {"width": 30, "num_heads": 4}),
    ("ckpt", "every1", {"every": 0}),
    ("ckpt", "every1", {"evry": 2}),
    ("optimizer", "adamw", {"lr": "fast"}),
    ("optimizer", "adamw", {"lr": -1}),
    ("optimizer", "adamw", {"moments": "fp8"}),
    ("optimizer", "adamw", {"lr": float("inf")}),
    ("optimizer", "sgd", {"nesterov": True, "momentum": 0}),
    ("sharding", "ddp", {"ranks": 0}),
    ("accum", "none", {"parts": 3}),
    ("precision", "fp16", {"init_scale": 0}),
    ("offload", "activations_disk", {"folder": "/nope"}),
    ("loader", "workers", {"num_workers": 0}),
    ("adapter", "lora", {"targets": []}),
    ("stepping", "after_backward", {"clip": -1}),
    ("schedule", "warmup_cosine", {"warmup_steps": -1}),
)


@pytest.mark.parametrize(("group", "option", "values"), WRONG, ids=str)
def test_a_wrong_value_gets_the_same_sentence(group: str, option: str, values: dict[str, Any]) -> None:
    node = OmegaConf.merge(node_of(group, option), values)
    assert isinstance(node, DictConfig)
    with pytest.raises(BadInput) as wanted:
        getattr(build(node, group), PATHS)()
    with pytest.raises(BadInput) as told:
        check_values(node, group)
    assert str(told.value) == str(wanted.value)


def test_what_needs_torch_or_code_of_the_user_is_left_out() -> None:
    unknown = source_checks.UNKNOWN
    assert source_of("lowvram.models.external").get("import_object") is unknown
    assert source_of("lowvram.knobs.accum").get("nn") is unknown
    for use in (lambda: unknown.float32, lambda: unknown(1), lambda: unknown == 1, lambda: bool(unknown)):
        with pytest.raises(LeftToChild):
            use()


def test_no_source_outside_the_package_is_read(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'was_here')!r}, 'w')\nclass X: ...\n")
    assert class_at(f"lowvram.{tmp_path}/evil.X") is None
    assert class_at("os.path.join") is None
    assert not (tmp_path / "was_here").exists()


def test_an_import_inside_a_function_is_left_out_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "lowvram"
    package.mkdir()
    (package / "option.py").write_text(
        "from dataclasses import dataclass\n"
        "from lowvram.config.errors import require\n"
        "@dataclass(frozen=True)\n"
        "class Option:\n"
        "    size: int = 1\n"
        "    def __post_init__(self):\n"
        "        require(self.size != 2, 'g.size', self.size, 'not 2')\n"
        "        import torch\n"
        "        require(torch.tensor(self.size) != 3, 'g.size', self.size, 'not 3')\n"
    )
    monkeypatch.setattr(source_checks, "ROOT", tmp_path)
    for size in (1, 3):
        check_values(OmegaConf.create({"_target_": "lowvram.option.Option", "size": size}), "g")
    with pytest.raises(BadInput, match=r"g\.size=2: must be not 2"):
        check_values(OmegaConf.create({"_target_": "lowvram.option.Option", "size": 2}), "g")


def test_no_torch_is_imported() -> None:
    code = "import sys; from lowvram.config import source_checks as checks; from lowvram.config.registry import *\n"
    code += f"for option in {OPTIONS!r}: checks.class_at(node_of(*option)['_target_'])\n"
    code += "assert not {'torch', 'transformers', 'datasets', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# What is typed -> the beginning of the sentence. No process is started for it.
LATE = {
    "data=text": "data.path='???': must be given a value: text",
    "data=text data.path=/nope": "data.path='/nope': must be an existing file",
    "train.batch_size=6 accum=x4": "train.batch_size=6: must be a multiple of accum.parts=4",
    "sharding=ddp sharding.ranks=3": "train.batch_size=4: must be a multiple of 3 (ranks x accum.parts",
    "plan.device=h900": "plan.device='h900': must be one of a100, ",
    "vram=8": "vram='8': must be null or a number above 0 with a unit",
    "-m seed=1,2 optimizer.lr=-1": "optimizer.lr=-1.0: must be above 0",
    "-m seed=1,2 data=text": "data.path='???': must be given a value: text",
}


@pytest.mark.parametrize("words", LATE)
def test_it_is_told_before_any_process_starts(
    call: Callable[..., Outcome], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_server() -> Any:
        pytest.fail("a server was started")

    monkeypatch.setattr(job_process, "Server", no_server)
    typed = words.split()
    kept = [word for word in TINY if word.partition("=")[0] not in {word.partition("=")[0] for word in typed}]
    if "data=text" in typed:
        kept = [word for word in kept if not word.startswith("data")]
    assert call(*kept, *typed).sentence.startswith(LATE[words])
