"""choice: the fewest blocks with which a plan fits, with its margin; the row says which."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from lowvram.planning.choice import first_fitting
from lowvram.planning.estimate import Fields
from lowvram.planning.worker import Planner
from tests.calls import TINY, TINY_RESNET, Outcome, history
from tests.hugging import tiny
from tests.planning.test_worker import CARD, MIB, composed, planned
from tests.tiers import first_of

pytestmark = [pytest.mark.medium, pytest.mark.sampled(2)]

Call = Callable[..., Outcome]


@pytest.mark.parametrize("guess", range(10))
@pytest.mark.parametrize("first", range(1, 10))
def test_the_first_that_fits_is_found_from_any_guess(first: int, guess: int) -> None:
    asked = list[int]()

    def fits(number: int) -> bool:
        asked.append(number)
        return number >= first

    assert first_fitting(fits, guess, 9) == first
    assert len(set(asked)) == len(asked) <= (2 if abs(first - guess) == 0 else 5)
    assert {0, 9}.isdisjoint(asked)


THREE = (*TINY, "model.num_layers=3", "train.batch_size=64", "data.sequence_length=64", "logits=chunked")
FIRST = [(), (0,), (0, 1), (0, 1, 2)]  # of equal blocks the first ones are the best: they wait the longest


def with_blocks(planner: Planner, device: str, blocks: tuple[int, ...]) -> int:
    """The planned memory, if these blocks are recomputed."""
    word = f"ckpt.blocks=[{','.join(map(str, blocks))}]"
    return planned(*THREE, device, "ckpt=auto", word, planner=planner)["least_vram_bytes"]


@pytest.mark.parametrize("device", first_of([CARD, "plan.device=cpu"]))
def test_the_fewest_blocks_that_fit_are_chosen(device: str) -> None:
    planner = Planner()
    least = {blocks: with_blocks(planner, device, blocks) for blocks in FIRST}
    assert len(set(least.values())) >= 3
    for num_bytes in least.values():
        words = (*THREE, device, "ckpt=auto", "plan.margin=0", f"vram={num_bytes / 2**20}MiB")
        plan = planned(*words, planner=planner)
        assert plan["fits"]
        wanted = next(blocks for blocks in FIRST if least[blocks] <= num_bytes)
        assert plan["chosen"] == {"ckpt": {"blocks": list(wanted)}}
        assert plan["least_vram_bytes"] == least[wanted]


BLOCKS = {
    "resnet": (*TINY_RESNET, "model.layers=[2,2]", "train.batch_size=64"),
    "external": (
        "model=external",
        "model.target=tests.yours.Stack",
        "model.args={vocab_size: 16}",
        "model.reads=TOKENS",
        "data=synthetic",
        "data.vocab_size=16",
        "data.sequence_length=32",
        "train.batch_size=64",
    ),
    "hf": ("model=hf", "data=synthetic", "data.sequence_length=32", "train.batch_size=64"),
}


@pytest.mark.parametrize("model", first_of(list(BLOCKS)))
def test_one_block_fewer_does_not_fit(model: str) -> None:
    """With all sets of one block less: without rates, all blocks cost the same."""
    folder = (f"model.name={tiny('llama')}",) if model == "hf" else ()
    words, planner = (*BLOCKS[model], *folder, "plan.device=cpu", "ckpt=auto", "plan.margin=0"), Planner()

    def least(blocks: tuple[int, ...]) -> int:
        word = f"ckpt.blocks=[{','.join(map(str, blocks))}]"
        return planned(*words, word, planner=planner)["least_vram_bytes"]

    none, one = least(()), least((0,))
    vram = f"vram={(none + one) // 2 / MIB}MiB"
    plan = planned(*words, vram, planner=planner)
    blocks = plan["chosen"]["ckpt"]["blocks"]
    assert plan["fits"]
    assert len(blocks) == 1
    fewer = [tuple(b for b in blocks if b != left) for left in blocks]
    assert all(least(each) > plan["budget_bytes"] for each in fewer)


@pytest.mark.slow
def test_where_rates_are_known_the_cheapest_block_that_fits_is_chosen() -> None:
    """The first block of a ResNet frees the most, and takes the longest."""
    words = ("model=resnet18", "data=synthetic", "data.image_size=112", "train.batch_size=256", CARD)
    words = (*words, "ckpt=auto", "allocator=expandable")  # without the fragments of the other allocator
    planner = Planner()

    def with_block(*blocks: int) -> Fields:
        return planned(*words, f"ckpt.blocks={list(blocks)}", "plan.margin=0", planner=planner)

    vram = (with_block()["least_vram_bytes"] + with_block(0)["least_vram_bytes"]) // 2
    plan = planned(*words, "plan.margin=0", f"vram={vram / MIB}MiB", planner=planner)
    assert plan["fits"]
    assert len(plan["chosen"]["ckpt"]["blocks"]) == 1
    assert plan["step_ms"] < with_block(0)["step_ms"]
    others = [with_block(number) for number in range(8)]
    assert all(each["least_vram_bytes"] > vram for each in others if each["step_ms"] < plan["step_ms"])


def test_if_nothing_fits_all_blocks_are_recomputed() -> None:
    plan = planned(*THREE, CARD, "ckpt=auto", "vram=150MiB")
    assert not plan["fits"]
    assert plan["chosen"] == {"ckpt": {"blocks": [0, 1, 2]}}


def test_blocks_that_were_typed_are_not_chosen_again() -> None:
    assert "chosen" not in planned(*THREE, CARD, "ckpt=auto", "ckpt.blocks=[2]", "vram=400MiB")


def test_a_cards_own_memory_is_the_budget_if_there_is_no_other() -> None:
    assert planned(*THREE, CARD, "ckpt=auto")["chosen"] == {"ckpt": {"blocks": []}}
    fields = Planner().fields(*composed(*THREE, "plan.device=cpu", "ckpt=auto"))
    assert fields["status"] == "incompatible"
    assert fields["reason"].startswith("vram=null: must be a budget, such as 8GiB, for a plan to choose ckpt.blocks")


# From the command line

LARGE = (*TINY, "model.num_layers=4", "train.batch_size=64", "data.sequence_length=64", "device=cpu", "vram=32MiB")


@pytest.mark.slow
def test_a_run_computes_what_its_plan_has_chosen(call: Call) -> None:
    """The row names the blocks, and with them typed the same point runs again."""
    outcome = call(*LARGE, "ckpt=auto", "plan.margin=0")
    assert outcome.code == 0, outcome.said()
    blocks = outcome.row["config"]["ckpt"]["blocks"]
    assert 0 < len(blocks) < 4
    word = f"ckpt.blocks={str(blocks).replace(' ', '')}"
    assert f"ckpt=auto: the plan has chosen {word}\n" in outcome.out
    assert outcome.row["choices"]["ckpt"] == "auto"
    assert outcome.row["plan"]["chosen"] == {"ckpt": {"blocks": blocks}}

    typed = call(*LARGE, "ckpt=auto", word, "hydra.run.dir=outputs/typed")
    assert typed.code == 0, typed.said()
    assert typed.row["memory"]["peak_bytes"] == outcome.row["memory"]["peak_bytes"]
    assert typed.row["loss"] == outcome.row["loss"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "vram=null: must be a budget, such as 8GiB, for a plan to choose ckpt.blocks"),
        (("vram=60MiB", "process=inline"), "ckpt.blocks=null: must be a list of numbers, such as [0, 1]"),
        (("vram=60MiB", "ckpt.blocks=[0,7]"), "ckpt.blocks=[0, 7]: must be numbers from 0 to 0, as this model has 1"),
    ],
    ids=str,
)
def test_what_cant_be_chosen_is_refused_in_a_sentence(call: Call, words: tuple[str, ...], sentence: str) -> None:
    assert call(*TINY, "ckpt=auto", "device=cpu", *words).sentence.startswith(sentence)


@pytest.mark.slow
def test_a_resumed_run_recomputes_the_same_blocks_and_ends_with_the_same_numbers(call: Call) -> None:
    words = (*LARGE, "ckpt=auto", "plan.margin=0")
    whole = call(*words, "hydra.run.dir=whole")
    assert call(*words, "train.steps=2", "hydra.run.dir=parts").code == 0
    resumed = call("resume=parts", "train.steps=3")
    assert resumed.code == whole.code == 0, resumed.said()
    assert resumed.row["config"]["ckpt"] == whole.row["config"]["ckpt"]
    assert history(resumed.folder)[-1] == history(whole.folder)[-1]


def test_a_run_for_which_nothing_fits_says_what_the_smallest_needs(call: Call) -> None:
    outcome = call(*LARGE[:-1], "vram=4MiB", "mode=plan", "ckpt=auto", "plan.margin=0.1")
    sentence = (
        r"ckpt=auto: no choice fits 4\.00 MiB, as the smallest needs [\d.]+ .iB plus a margin of 10%: ckpt\.blocks="
    )
    assert re.search(sentence, outcome.out)


SMALL_PARTS = (*TINY, "model.num_layers=3", "model.width=2048", "train.batch_size=4", "accum=x4")  # copies take longer


def test_as_many_blocks_stay_on_the_device_as_fit() -> None:
    planner = Planner()
    least = [
        planned(*SMALL_PARTS, CARD, "weights=auto", f"weights.resident={number}", planner=planner)["least_vram_bytes"]
        for number in range(4)
    ]
    for number in (0, 2, 3):
        words = (*SMALL_PARTS, CARD, "weights=auto", "plan.margin=0", f"vram={least[number] / 2**20}MiB")
        plan = planned(*words, planner=planner)
        assert plan["fits"]
        wanted = max(each for each in range(4) if least[each] <= least[number])
        assert plan["chosen"] == {"weights": {"resident": wanted}}
        assert plan["least_vram_bytes"] == least[wanted]


def test_no_block_stays_where_a_step_is_as_fast_without() -> None:
    """Large parts hide the copies."""
    words = (*TINY, "model.num_layers=4", "model.width=256", "train.batch_size=256", "tile=blocks", "tile.samples=64")
    plan = planned(*words, CARD, "weights=auto", "vram=8GiB", planner=Planner())
    assert plan["chosen"] == {"weights": {"resident": 0}}
