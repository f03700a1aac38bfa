"""Bytes per parameter on a card, counted by hand: what weights, gradients, states and updates take."""

from __future__ import annotations

import pytest

from lowvram.core.device import Card
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob
from lowvram.data.spec import DataSpec, Modality
from lowvram.knobs.precision import Bf16Split
from lowvram.models.transformer import TransformerConfig
from lowvram.planning.target import Target
from lowvram.planning.trace.events import Sums
from lowvram.planning.trace.tracer import trace
from lowvram.tasks import Auto
from tests.laboratory import knobs_of

H100 = Target(Card("H100", (9, 0)))
PROBLEM = Auto().pose(TransformerConfig(2, 256, 4, 64), DataSpec(Modality.TOKENS, 4096, (64,)))
EMBEDDING = 4096 * 256
MATRICES = 2 * 12 * 256**2
NUM_PARAMETERS = EMBEDDING + MATRICES + 2 * (4 + 1 + 3 + 1 + 4) * 256 + 2 * 256  # of norms and biases, the last norm's
COMPANDED = 1 + 4 / 64  # bytes of a state of 8 bits: a code, and a scale in fp32 for 64 of them


def summed(**choices: str | Knob) -> Sums:
    return trace(PROBLEM, knobs_of(**choices), 1, H100).sums()


def per_parameter(num_bytes: int) -> float:
    return num_bytes / NUM_PARAMETERS


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("choices", "weights", "gradients", "state"),
    [
        ({}, 4, 4, 8),
        ({"precision": "bf16"}, 4, 4, 8),
        ({"precision": "bf16_pure"}, 2, 2, 8),
        ({"precision": "bf16_split"}, 2, 2, 8 + 1),
        ({"precision": Bf16Split(16)}, 2, 2, 8 + 2),
        ({"precision": "bf16_split", "optimizer": "adamw_companded"}, 2, 2, 2 * COMPANDED + 1),
        ({"optimizer": "sgd"}, 4, 4, 4),
        ({"optimizer": "sgd_companded"}, 4, 4, COMPANDED),
        ({"optimizer": "muon_companded"}, 4, 4, COMPANDED * (1 + (NUM_PARAMETERS - MATRICES) / NUM_PARAMETERS)),
        ({"optimizer": "adafactor"}, 4, 4, 0),
        ({"optimizer": "adamw_8bit"}, 4, 4, 2 * (1 + 4 / 256)),  # a scale in fp32 for 256 codes
        ({"optimizer": "adamw_4bit"}, 4, 4, 2 * (0.5 + 4 / 128)),
    ],
    ids=str,
)
def test_each_format_takes_its_bytes(
    choices: dict[str, str | Knob], weights: float, gradients: float, state: float
) -> None:
    """Small tensors are the rest: multiples of 512 bytes, and states that stay in fp32."""
    most = summed(**choices).by_kind_max
    assert per_parameter(most[Kind.PARAMETERS]) == pytest.approx(weights, abs=0.02)
    assert per_parameter(most[Kind.GRADIENTS]) == pytest.approx(gradients, abs=0.02)
    assert per_parameter(most[Kind.OPTIMIZER]) == pytest.approx(state, abs=0.06)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_fused_updates_need_nothing_of_their_own(optimizer: str) -> None:
    """Beside a count of steps and the like."""
    assert per_parameter(summed(optimizer=optimizer).by_kind_max[Kind.OTHER]) < 0.05


@pytest.mark.parametrize(("optimizer", "each_bytes"), [("adamw_8bit", 0), ("adamw_4bit", 24)])
def test_compiled_updates_update_one_parameter_after_the_other(optimizer: str, each_bytes: int) -> None:
    """torchao's, which would take 41 bytes for each of a parameter's elements if they ran eagerly."""
    other = summed(optimizer=optimizer).by_kind_max[Kind.OTHER]
    assert each_bytes * EMBEDDING <= other < (each_bytes + 0.2) * EMBEDDING


def test_adafactor_updates_one_parameter_after_the_other() -> None:
    """So it holds a few copies of the largest at a time, not of all."""
    other = summed(optimizer="adafactor").by_kind_max[Kind.OTHER]
    assert EMBEDDING * 4 <= other < 3.1 * EMBEDDING * 4


def test_what_is_offloaded_is_on_the_host() -> None:
    """Master weights, sums of gradients and two moments, in fp32; on the card only the weights."""
    sums = summed(stepping="cpu_offload")
    assert per_parameter(sums.host_bytes) == pytest.approx(16, abs=0.1)
    assert per_parameter(sums.by_kind_max[Kind.PARAMETERS]) == pytest.approx(4, abs=0.02)
    assert sums.by_kind_max[Kind.OPTIMIZER] == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_ranks_share_weights_gradients_and_state(num_ranks: int) -> None:
    sums = trace(PROBLEM, knobs_of(sharding="fsdp"), 8, Target(H100.card, num_ranks)).sums()
    assert per_parameter(sums.by_kind_max[Kind.OPTIMIZER]) == pytest.approx(8 / num_ranks, abs=0.1)


def test_an_update_of_packed_states_needs_no_more_than_pieces_in_fp32() -> None:
    """Weight, gradient and two moments of the largest parameter, which is one piece here."""
    other = summed(precision="bf16_split", optimizer="adamw_companded").by_kind_max[Kind.OTHER]
    assert 4 * 4 * EMBEDDING <= other < 4.1 * 4 * EMBEDDING
