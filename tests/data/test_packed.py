from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from lowvram.config.errors import BadInput
from lowvram.core.mesh import Ranks
from lowvram.core.rig import IGNORE, Part
from lowvram.data.batch_sizes import SameSize
from lowvram.data.glyphs import Glyphs
from lowvram.data.loader import collate
from lowvram.data.packed import WIDEST, Packed, assign_rows, best_fit, narrowest, pack
from lowvram.data.python_packages import PythonPackages
from lowvram.data.python_source import PythonSource
from lowvram.data.source import Data, Source
from lowvram.data.spec import IDS, POSITIONS, DataSpec, Modality
from lowvram.models.external import ExternalConfig
from tests.laboratory import CPU, TRANSFORMER, documents, lengths_like

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SPEC = DataSpec(Modality.TOKENS, 50, (32,))
LENGTHS = lengths_like(200, 32, torch.Generator().manual_seed(0))
TEXTS = documents([length + 1 for length in LENGTHS], SPEC)


def taken(loader: Packed, number: int, first_step: int = 0, batch_size: int = 16) -> list[Part]:
    batches = loader.batches(TEXTS, SameSize(batch_size), 0, first_step, CPU)
    parts = list(itertools.islice(batches, number))
    batches.close()
    return parts


def sequences(part: Part) -> list[tuple[list[int], list[int]]]:
    """Inputs and targets of each sequence of a batch, without what is left over."""
    found = []
    for ids, places, targets in zip(part.inputs[IDS], part.inputs[POSITIONS], part.targets, strict=True):
        starts = [*(places == 0).nonzero().flatten().tolist(), len(places)]
        for start, stop in itertools.pairwise(starts):
            assert places[start:stop].tolist() == list(range(stop - start))
            if targets[start] != IGNORE:
                found.append((ids[start:stop].tolist(), targets[start:stop].tolist()))
    return found


# Which sequences share a row


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("unit", [1, 2, 3, 4, 15])
def test_every_sequence_has_one_place(seed: int, unit: int) -> None:
    lengths = lengths_like(16, 32, torch.Generator().manual_seed(seed))
    rows = assign_rows(lengths, 32, unit)
    assert sorted(itertools.chain(*rows)) == list(range(16))
    assert len(rows) % unit == 0 or len(rows) == 16
    assert all(rows)
    assert max(sum(lengths[each] for each in row) for row in rows) <= max(WIDEST * 32, 2 * max(lengths))


def test_little_is_left_over() -> None:
    """Of 64 sequences whose lengths are like those of real texts."""
    lengths = np.random.default_rng(0).lognormal(5.0, 1.0, 64).astype(int).clip(1, 512).tolist()
    rows = assign_rows(lengths, 512, 1)
    width = max(sum(lengths[each] for each in row) for row in rows)
    assert 1 - sum(lengths) / (len(rows) * width) <= 0.02
    assert 1.5 * len(rows) * width < 64 * 512


def test_sequences_that_fill_their_rows_are_left_alone() -> None:
    for unit in (1, 3):
        assert assign_rows([32] * 5, 32, unit) == [[0], [1], [2], [3], [4]]


def test_the_narrowest_rows_are_found() -> None:
    assert narrowest([7, 5, 4, 4], 2) == ([[0, 2], [1, 3]], 11)
    assert best_fit([7, 5, 4, 4], 2, 10) == []


def test_no_row_stays_empty_where_ranks_need_more_rows_than_there_is_text() -> None:
    rows = assign_rows([9, 1, 1, 1], 32, 4)
    assert sorted(map(len, rows)) == [1, 1, 1, 1]


# What lies in them


def test_a_batch_holds_the_same_sequences_as_a_padded_one() -> None:
    keys = [(index, 3) for index in range(16)]
    found, padded = Packed().collate(TEXTS, keys), collate(TEXTS, keys)
    wanted = [
        (inputs[:length].tolist(), targets[:length].tolist())
        for inputs, targets, length in zip(padded.inputs, padded.targets, LENGTHS[:16], strict=True)
    ]
    assert sorted(sequences(found)) == sorted(wanted)
    assert found.num_targets == padded.num_targets
    assert found.targets.numel() < padded.targets.numel() / 1.5


def test_an_epoch_shows_every_sequence_once() -> None:
    found = Counter(tuple(ids) for part in taken(Packed(), 25) for ids, _ in sequences(part))
    inputs = [tuple(TEXTS.sample(index, 0)[0][: LENGTHS[index]].tolist()) for index in range(200)]
    assert found == Counter(inputs * 2)


@pytest.mark.parametrize("loader", [Packed(), Packed(num_workers=1, prefetch=1), Packed(num_workers=2)], ids=repr)
@pytest.mark.parametrize("first_step", [0, 1, 7, 30])
def test_resuming_at_any_step_gives_the_same_batches(loader: Packed, first_step: int) -> None:
    whole = taken(Packed(), first_step + 4)[first_step:]
    for one, other in zip(taken(loader, 4, first_step), whole, strict=True):
        assert all(map(torch.equal, one.tensors(), other.tensors()))


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_ranks_have_as_many_rows_and_together_the_batch(monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> None:
    whole = [sorted(sequences(part)) for part in taken(Packed(), 5)]
    monkeypatch.setattr(Ranks, "size", num_ranks)
    shares = []
    for each in range(num_ranks):
        monkeypatch.setattr(Ranks, "rank", each)
        shares.append(taken(Packed(), 5))
    for parts, wanted in zip(zip(*shares, strict=True), whole, strict=True):
        assert len({part.targets.shape for part in parts}) == 1
        assert {part.num_in_batch for part in parts} == {None}
        assert sorted(sequence for part in parts for sequence in sequences(part)) == wanted


def test_a_plan_has_room_for_the_longest_sequences() -> None:
    rows = Packed().most_rows(TEXTS, 16)
    assert rows == -(-sum(sorted(LENGTHS)[-16:]) // 32)
    assert all(part.targets.numel() <= rows * 32 for part in taken(Packed(), 30))
    assert Packed().most_rows(documents([40] * 3, SPEC), 8) <= 8


# What can't be packed


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            PythonSource(32),
            "must be inline or workers for samples that are all of one length: .* data.samples=documents",
        ),
        (PythonPackages(32), "must be bucketed for labelled tokens: a row has one class"),
        (Glyphs(16), "must be inline or workers for images, which have no lengths"),
    ],
)
def test_other_samples_are_refused(source: Source, said: str) -> None:
    with pytest.raises(BadInput, match=rf"loader='packed': {said}"):
        Packed().fit(source.open(seed=0), TRANSFORMER)


def test_a_model_that_nobody_knows_is_refused() -> None:
    data = Data(SPEC, TEXTS, TEXTS, "")
    with pytest.raises(
        BadInput, match="loader='packed': must be bucketed: it isn't known whether model=external keeps"
    ):
        Packed().fit(data, ExternalConfig("torch.nn.Linear"))


def test_numbers_out_of_range() -> None:
    with pytest.raises(BadInput, match=r"loader\.num_workers=-1: must be at least 0"):
        Packed(num_workers=-1)
    with pytest.raises(BadInput, match=r"loader\.prefetch=0: must be at least 1"):
        Packed(prefetch=0)


def test_packing_is_a_function_of_the_lengths() -> None:
    keys = [(index, 0) for index in range(16)]
    assert pack(TEXTS, keys, 1) == pack(TEXTS, keys, 1)


def test_texts_that_are_not_predicted_token_by_token_are_refused_for_what_they_are() -> None:
    for modality in (Modality.MASKED_TOKENS, Modality.PAIRS):
        data = Data(replace(SPEC, modality=modality), TEXTS, TEXTS, "")
        with pytest.raises(BadInput, match=f"bucketed for {modality.value}: rows hold several texts only where each"):
            Packed().fit(data, TRANSFORMER)
