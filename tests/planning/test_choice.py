"""choice: the fewest blocks with which a plan fits, with its margin; the row says which."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lowvram.planning.choice import first_fitting
from lowvram.planning.worker import Planner
from tests.calls import TINY, Outcome
from tests.planning.test_worker import CARD, composed, planned

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


@pytest.mark.parametrize("device", ["plan.device=cpu", CARD])
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


def test_if_nothing_fits_all_blocks_are_recomputed() -> None:
    plan = planned(*THREE, CARD, "ckpt=auto", "vram=400MiB")
    assert not plan["fits"]
    assert plan["chosen"] == {"ckpt": {"blocks": [0, 1, 2]}}


def test_blocks_that_were_typed_are_not_chosen_again() -> None:
    assert "chosen" not in planned(*THREE, CARD, "ckpt=auto", "ckpt.blocks=[2]", "vram=400MiB")


def test_a_cards_own_memory_is_the_budget_if_there_is_no_other() -> None:
    assert planned(*THREE, CARD, "ckpt=auto")["chosen"] == {"ckpt": {"blocks": []}}
    fields = Planner().fields(*composed(*THREE, "plan.device=cpu", "ckpt=auto"))
    assert fields["status"] == "incompatible"
    assert fields["reason"].startswith("vram=null: must be a budget, such as 8GiB, with ckpt=auto")


# From the command line

LARGE = (*TINY, "model.num_layers=4", "train.batch_size=64", "data.sequence_length=128", "device=cpu", "vram=60MiB")


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


@pytest.mark.parametrize("words", [("device=cpu",), ("device=cpu", "vram=60MiB", "process=inline")], ids=str)
def test_without_a_plan_it_is_refused(call: Call, words: tuple[str, ...]) -> None:
    outcome = call(*TINY, "ckpt=auto", *words)
    assert outcome.code == 3
    assert "ckpt.blocks=null: must be a list of numbers of blocks, such as [0, 1], where no plan" in outcome.said()
