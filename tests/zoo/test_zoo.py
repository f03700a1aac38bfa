"""Each model of the zoo with each knob option of conf/, against a plain loop of torch.

An option that is EXACT or rounds keeps losses, parameters, buffers and the numbers that modules hold; one that is LOSSY
learns, and keeps names and what is frozen. An option that a model can't have says why in one sentence.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch

from lowvram.compress.qat import Int4
from lowvram.config.errors import BadInput, Incompatible, Refused
from lowvram.core.fact import Fact
from lowvram.core.generators import seed_all
from lowvram.core.knob import Exactness, Stage
from lowvram.core.structure import BLOCKS
from lowvram.knobs.accum import Parts
from lowvram.knobs.tile import TiledBlocks, TiledMLP
from tests.laboratory import FACT_NAMES, KNOBS, NEUTRAL, lacking_of, missing_here
from tests.test_laws import Pair
from tests.tiers import first_of
from tests.zoo import generative, language, odd, recurrent, torchvision_models, vision, writing
from tests.zoo.foreign import Foreign
from tests.zoo.trial import (
    PLAIN_SGD,
    Trained,
    adamw,
    batches,
    default_format,
    differences,
    make,
    plain,
    sgd,
    slopes,
    standing_still,
    task_of,
    with_knob,
)

pytestmark = [
    pytest.mark.medium,
    pytest.mark.usefixtures("compiled_quickly", "same_process_afterwards"),
    pytest.mark.filterwarnings("ignore"),  # of torch, about what strangers' models use
]

ZOO: dict[str, Foreign] = {
    **language.MODELS,
    **vision.MODELS,
    **generative.MODELS,
    **recurrent.MODELS,
    **odd.MODELS,
    **writing.MODELS,
    **torchvision_models.MODELS,
}
# These run in `scripts/test`: ties and dropout, experts, statistics, noise, recurrence in place, forces, complex
# numbers, counters.
QUICK = ["gpt_dropout", "mixture_of_experts", "resnet", "denoiser", "gru", "energy", "fourier", "memory"]
IN_ORDER = [*QUICK, *(name for name in ZOO if name not in QUICK)]
SIZES = (6, 6, 5)
FP64_BAND, AUTOCAST_BAND = 1e-10, 1e-4  # of sums in another order
OWN_LOOPS: dict[str, Any] = {"sgd": sgd, "adamw": adamw}  # optimizers that torch has, too
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SMALL: dict[Pair, Any] = {
    ("tile", "blocks"): TiledBlocks(samples=4),
    ("tile", "mlp"): TiledMLP(tokens=7),
    ("qat", "int4"): Int4(group=2),
}


def choice(pair: Pair) -> Any:
    """An option as it is tried: by its name, or a knob that cuts even few samples."""
    return SMALL.get(pair, pair[1])


@cache
def loop(name: str, parts: int, optimizer: Callable[..., Any] = sgd) -> Trained:
    return plain(ZOO[name], batches(ZOO[name], *sizes_of(parts)), parts=parts, make_optimizer=optimizer)


def sizes_of(parts: int) -> tuple[int, ...]:
    """Enough samples for so many parts."""
    return SIZES if parts <= min(SIZES) or parts == 8 else (parts + 1,)


# What the first step, or a knob, says besides the facts that the model lacks; `Foreign.refuses` lists where it has to.
SENTENCES = {
    "adapter=lora": "can carry an adapter",
    "adapter=qlora": "can carry an adapter|aren't differentiated again",
    "sparsity": "must be names of layers whose weights train",
    "precision=bf16_pure": "own code computes with weights in bf16",
    "precision=bf16_split": "own code computes with weights in bf16",
    "compile=torchscript": "can't record|TorchScript can run",
    "compile=model": "aren't differentiated again",
    "tile": "changes what it is given in place|changes in each forward pass|aren't differentiated again",
    "ckpt": "changes what it is given in place",
    "offload=parameters": "forward passes of their modules alone|change nothing in place",
}


def fault_of(name: str, pair: Pair) -> str | None:
    """What is wrong with an option for a model; None if nothing is."""
    words = reasons(name, pair)
    try:
        with default_format(torch.float32 if is_single(pair) else torch.float64):
            faults = list(TRIALS[KNOBS[pair].exactness](name, pair))
    except (Incompatible, BadInput, Refused) as refusal:
        is_expected = bool(words) and re.search(words, str(refusal)) and "\n" not in str(refusal)
        return None if is_expected else f"refused: {refusal}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "isn't refused" if words else "; ".join(faults) or None


def reasons(name: str, pair: Pair) -> str:
    """A pattern of the sentence with which an option has to be refused; empty if it has to work."""
    option, refuses = "=".join(pair), ZOO[name].refuses.split()
    needs = KNOBS[pair].needs()
    if Fact.COMPILED in needs:  # compile=blocks stands in for compile=none
        needs |= {BLOCKS}
    lacks = [re.escape(fact.value) for fact in needs if FACT_NAMES.get(fact) in ZOO[name].absent]
    is_listed = option in refuses or pair[0] in refuses
    return "|".join([*lacks, *([SENTENCES.get(option) or SENTENCES[pair[0]]] if is_listed else [])])


def is_single(pair: Pair) -> bool:
    """Whether weights are in fp32, for options that make others of them."""
    return KNOBS[pair].exactness is Exactness.LOSSY or pair[1] in HALVES


def exact(name: str, pair: Pair) -> Iterator[str]:
    knob, foreign = KNOBS[pair], ZOO[name]
    if pair[0] == "optimizer":
        yield from optimizers(name, pair)
    elif foreign.draws and pair[0] == "tile":  # each tile draws for itself
        by_differences, by_update = slopes(foreign, SIZES[0], pair[0], choice(pair))
        if abs(by_differences - by_update) > 1e-5 * max(1e-2, abs(by_differences)):
            yield f"its loss has the slope {by_differences:.6g}, its update {by_update:.6g}"
    else:
        parts = knob.parts if isinstance(knob, Parts) else 1
        found = with_knob(foreign, batches(foreign, *sizes_of(parts)), pair[0], choice(pair))
        yield from beyond(FP64_BAND, found, loop(name, parts))


def optimizers(name: str, pair: Pair) -> Iterator[str]:
    """The gradients that an optimizer is given, while weights stand still; its steps, if torch has it."""
    foreign = ZOO[name]
    data = batches(foreign, *SIZES)
    found, wanted = with_knob(foreign, data, *pair, lr=0.0), loop(name, 1, standing_still)
    yield from beyond(FP64_BAND, found, wanted)
    scale = max(1.0, *map(abs, wanted.losses))
    for parameter, theirs in wanted.gradients.items():
        if theirs[0].is_complex():  # an optimizer is given its real and imaginary parts
            continue
        ours = found.gradients.get(parameter, [])
        errors = [float((one - other).abs().max()) for one, other in zip(ours, theirs, strict=False) if one.numel()]
        if len(ours) != len(theirs) or max(errors, default=0.0) > FP64_BAND * scale:
            yield f"gradients of {parameter} are off by {max(errors, default=0.0):.2g}"
    yield from learning(name, pair)
    if (own := OWN_LOOPS.get(pair[1])) is not None:
        found = with_knob(foreign, data, pair[0], PLAIN_SGD if pair[1] == "sgd" else pair[1])
        yield from beyond(FP64_BAND, found, loop(name, 1, own))


def rounding(name: str, pair: Pair) -> Iterator[str]:
    """Half formats are held against torch's own autocast and loss scale; where these fail, it may be refused."""
    foreign = ZOO[name]
    data, dtype = batches(foreign, *SIZES), HALVES.get(pair[1])
    if dtype is None:
        yield from beyond(KNOBS[pair].band, with_knob(foreign, data, *pair), loop(name, 1))
        return
    scaler = torch.amp.GradScaler("cpu") if dtype is torch.float16 else None
    try:
        wanted = plain(foreign, data, autocast=partial(torch.autocast, "cpu", dtype), scaler=scaler)
    except RuntimeError:
        try:  # torch's loss scale takes no complex weights
            with_knob(foreign, data, *pair)
        except Incompatible as refusal:
            if "under torch.autocast" not in str(refusal):
                raise
        return
    yield from beyond(AUTOCAST_BAND, with_knob(foreign, data, *pair), wanted)


def learning(name: str, pair: Pair) -> Iterator[str]:
    """Five steps on one batch: the loss is finite and doesn't run away; names stay, and what is frozen stays so."""
    foreign = ZOO[name]
    data = batches(foreign, SIZES[0])
    wanted = plain(foreign, data)
    found = with_knob(foreign, data * 5, pair[0], choice(pair), lr=None if pair[0] == "optimizer" else 1e-3)
    is_rising = pair[0] != "optimizer" and min(found.losses[1:]) > 2 * found.losses[0]
    if is_rising or not all(map(math.isfinite, found.losses[:2])):
        yield f"doesn't learn: {found.losses}"
    names = {each.replace(".base_layer.", ".") for each in found.saved}
    if not (names >= wanted.saved or pair == ("adapter", "qlora")):
        yield f"names are missing: {sorted(wanted.saved - names)}"
    trained = (
        each for each in wanted.frozen & found.last.keys() if not torch.equal(found.last[each], found.first[each])
    )
    if changed := sorted(trained):
        yield f"trains what was frozen: {changed}"


def beyond(band: float, found: Trained, wanted: Trained) -> Iterator[str]:
    errors = differences(found, wanted)
    yield from (f"{what} off by {error:.2g}" for what, error in errors.items() if not error <= band)
    if found.saved != wanted.saved:
        yield f"names differ: {sorted(found.saved ^ wanted.saved)}"


TRIALS = {Exactness.EXACT: exact, Exactness.ROUNDING: rounding, Exactness.LOSSY: learning}


def is_compiled(pair: Pair) -> bool:
    knob = KNOBS[pair]
    return (knob.stage is Stage.COMPILE and pair[1] != "torchscript") or Fact.COMPILED in knob.needs()


def is_tried(pair: Pair) -> bool:
    """Neutral options do nothing, but for the optimizer; one of them stands for all."""
    is_neutral = NEUTRAL[pair[0]] == pair[1] and pair[0] not in ("accum", "optimizer")
    return not is_neutral and not missing_here(pair) and not is_compiled(pair)


GROUPS = {group: [pair for pair in KNOBS if pair[0] == group and is_tried(pair)] for group in NEUTRAL}
CASES = [(name, group) for name in IN_ORDER for group in GROUPS if GROUPS[group]]
COMPILED = [pair for pair in KNOBS if is_compiled(pair) and NEUTRAL[pair[0]] != pair[1] and not missing_here(pair)]


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "group"), first_of(CASES, sum(name in QUICK for name, _ in CASES)))
def test_each_option_of_a_group(name: str, group: str) -> None:
    faults = {"=".join(pair): fault for pair in GROUPS[group] if (fault := fault_of(name, pair))}
    assert not faults


@pytest.mark.slow
@pytest.mark.parametrize("pair", COMPILED, ids="=".join)
@pytest.mark.parametrize("name", ZOO)
def test_each_option_that_compiles(name: str, pair: Pair) -> None:
    assert fault_of(name, pair) is None


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", first_of(IN_ORDER, len(QUICK)))
def test_what_a_model_lacks(name: str) -> None:
    model = ZOO[name].make()
    task = task_of(ZOO[name], model, batches(ZOO[name], 2))
    assert {FACT_NAMES[fact] for fact in lacking_of(task, *KNOBS.values())} == ZOO[name].absent


def test_draws_are_declared() -> None:
    """The loss depends on the state of generators exactly where a model draws."""
    for name, foreign in ZOO.items():
        (inputs, targets), losses = batches(foreign, 4)[0], set[float]()
        for seed in range(3):
            model = make(foreign).train()
            seed_all(seed)
            outputs = model(**inputs) if isinstance(inputs, dict) else model(inputs)
            losses.add(foreign.loss(model, outputs, targets).item())
        assert (len(losses) > 1) == foreign.draws, name
