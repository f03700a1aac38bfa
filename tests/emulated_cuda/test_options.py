"""Each option of every group, in an ordinary child process on the emulated device, trains as the plain loop does on the
CPU, or is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest

from lowvram.config.registry import Option, all_options, knob_of, neutral_options, options_of
from lowvram.core.fact import Fact
from scripts.pages.compatibility import EXTRA, LACKS, REFUSED, deviation, is_its_own
from tests.calls import ROOT, TINY, TINY_RESNET, Outcome, history
from tests.laboratory import IS_EMULATED, KNOBS, OF_TRITON

Call = Callable[..., Outcome]
Note = Callable[[str, object], None]
pytestmark = [pytest.mark.emulated, pytest.mark.skipif(not IS_EMULATED, reason="not the emulated device")]
MEASURED = ("mode=measure", "measure.warmup_steps=1", "measure.steps=2", "train.batch_size=32")
MODELS = {
    "transformer": (*TINY, *MEASURED, "model.num_layers=2"),
    "resnet": (*TINY_RESNET, *MEASURED, "model.norm=group"),
}
SAME = 1e-6  # relative, of fp32 in the same order of sums
# Kernels that a compiler writes have no values (test_compiled.py).
COMPILED = {("compile", option) for option in options_of("compile")} | {
    option for option in all_options() if OF_TRITON & knob_of(option).needs()
}
CHOSEN = [option for option in all_options() if option not in {*neutral_options().items(), *COMPILED}]
TEXTS = (f"data.path={ROOT / 'docs'}", "data=text", "data.pattern=*.md", "data.samples=documents")  # of uneven lengths
OTHERS = {  # of groups that hold no knobs
    "loader=workers": ("loader.num_workers=1",),
    "loader=bucketed": TEXTS,
    "loader=packed": TEXTS,
    "data=python_source": ("data.max_bytes=100000",),
    "task=language_modelling": (),
    "schedule=cosine": ("mode=train",),
    "schedule=warmup_cosine": ("mode=train",),
    "logger=wandb": (),
    "debug=measure": (),
}


def distance(found: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest relative difference."""
    return max(abs(one - other) / abs(other) for one, other in zip(found, wanted, strict=True))


def learned(outcome: Outcome) -> list[float]:
    """Losses, norms of gradients and evaluations, in their order."""
    assert outcome.code == 0, outcome.said()
    lines = history(outcome.folder)
    return [line[name] for line in lines for name in ("loss/train", "grad_norm", "loss/eval") if name in line]


_plain: dict[tuple[str, ...], list[float]] = {}  # what several are compared with


def plain(call: Call, *words: str) -> list[float]:
    """What is learned on the CPU."""
    if words not in _plain:
        _plain[words] = learned(call(*words, "device=cpu", "hydra.run.dir=plain"))
    return _plain[words]


@pytest.mark.parametrize("model", MODELS)
def test_the_plain_loop_learns_the_same(call: Call, model: str) -> None:
    on_card = call(*MODELS[model], "device=cuda", "hydra.run.dir=card")
    assert on_card.row["memory"]["source"] == "cuda_allocator"
    losses = learned(on_card)  # before another call: an outcome tells of the newest folder
    assert distance(losses, plain(call, *MODELS[model])) <= SAME


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("option", CHOSEN, ids="=".join)
def test_an_option_learns_what_the_plain_loop_does(
    call: Call, option: Option, model: str, record_property: Note
) -> None:
    words = ["=".join(option), *EXTRA.get(option, [])]
    needs = KNOBS[option].needs()
    ranks = ["sharding.ranks=2"] if Fact.MANY_RANKS in needs else []
    found = call(*MODELS[model], "device=cuda", *words, *ranks, "hydra.run.dir=found")
    if Fact.CPU in needs:
        assert "needs that the device is the CPU" in found.sentence
    elif needs & LACKS[model]:
        assert "needs that the " in found.sentence
    elif option in REFUSED[model]:
        assert re.match(rf"sharding[.=]{option[1]}: ", found.sentence)
    else:
        losses = learned(found)
        wanted = plain(call, *MODELS[model], *(words if is_its_own(option) else []))
        assert deviation(frozenset([option]), losses, wanted) is None
    record_property("points", 1)


@pytest.mark.parametrize("option", OTHERS)
def test_data_and_loops_are_the_same_on_both(call: Call, option: str, record_property: Note) -> None:
    words = [*MODELS["transformer"], *OTHERS[option], option]
    on_card = learned(call(*words, "device=cuda", "hydra.run.dir=card"))
    assert distance(on_card, plain(call, *words)) <= SAME
    record_property("points", 1)
