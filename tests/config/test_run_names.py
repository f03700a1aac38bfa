"""Names and groups of runs, for people: short, unlike each other, and without secrets."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowvram.config.run_names import run_name, sweep_group


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("", "baseline"),
        ("precision=bf16 ckpt=every2", "bf16-every2"),
        ("precision=fp32 ckpt=none train.steps=100 seed=0", "baseline"),  # the defaults
        ("optimizer.lr=0.01 precision=bf16", "bf16-lr0.01"),  # options first
        (
            "model=resnet train.steps=5 device=cpu mode=measure measure.steps=3 logger=none train.eval_every=2",
            "resnet-steps5",
        ),
        ("data=text data.path=/home/me/my_texts", "text-my_texts"),
        ("+model.args.width=4 ~optimizer.eps", "width4"),
        ("model=hf model.name=org/some-model", "hf-some-model"),
        ("precision=bf16 precision=fp16", "fp16"),  # the last one wins, as in Hydra
        ("name=thesis precision=bf16", "thesis"),
        ("experiment=lean", "lean"),
        ("vram=8GiB resume=last hydra.run.dir=x", "baseline"),
        ("eval.metrics=[mine.top5] callbacks=[mine.Watch]", "baseline"),  # who looks on changes nothing
    ],
)
def test_a_run_is_named_by_what_it_changes(words: str, name: str) -> None:
    assert run_name(words.split()) == name


def test_what_is_swept_is_always_named() -> None:
    assert run_name(["precision=bf16", "seed=0"], ["seed"]) == "bf16-seed0"
    assert run_name(["vram=8GiB", "precision=fp32"], ["precision", "vram"]) == "fp32-vram8GiB"
    assert run_name(["name=thesis", "precision=bf16", "seed=1"], ["seed"]) == "thesis-seed1"


def test_names_are_short_and_hold_no_secret() -> None:
    assert len(run_name([f"model.args.value{n}={'x' * 50}" for n in range(9)])) <= 100
    assert "hunter22" not in run_name(["+model.args.api_key=hunter22"])


def test_a_group_says_when_a_sweep_began_and_what_it_varies() -> None:
    folder = Path("outputs/sweeps/2026-11-25/13-09-29-9b2b")
    assert sweep_group(folder, ["precision", "ckpt"]) == "2026-11-25 13:09 precision×ckpt"
    assert sweep_group(folder, ["optimizer.lr"]) == "2026-11-25 13:09 lr"
    assert sweep_group(folder, list("abcdef")) == "2026-11-25 13:09 a×b×c×d×…"
    assert sweep_group(folder, []) == "2026-11-25 13:09"


def test_a_folder_that_the_user_has_named_is_the_group() -> None:
    assert sweep_group(Path("outputs/thesis"), ["precision"]) == "thesis"


def test_of_ones_own_parts_the_name_says_which() -> None:
    words = "model=external model.target=mine.models.Speaker data=hub data.name=some/texts.jsonl"
    words = f"{words} optimizer=external optimizer.target=torch.optim.NAdam"
    assert run_name(words.split()) == "hub-Speaker-texts.jsonl-NAdam"
    assert run_name(["model=external", "model.target=a.B"], swept=["model"]) == "external-B"
