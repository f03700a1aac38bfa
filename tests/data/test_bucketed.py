from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from lowvram.config.errors import BadInput
from lowvram.core.mesh import Ranks
from lowvram.core.rig import IGNORE, Part
from lowvram.data.batch_sizes import SameSize
from lowvram.data.bucketed import Bucketed, bucketed_keys
from lowvram.data.glyphs import Glyphs
from lowvram.data.loader import Inline
from lowvram.data.python_packages import PythonPackages
from lowvram.data.python_source import PythonSource
from lowvram.data.source import Data, Source
from lowvram.data.spec import IDS, MASK, DataSpec, Modality
from tests.laboratory import CPU, TRANSFORMER, documents, lengths_like

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SPEC = DataSpec(Modality.TOKENS, 50, (32,))
LENGTHS = lengths_like(200, 32, torch.Generator().manual_seed(0))
TEXTS = documents([length + 1 for length in LENGTHS], SPEC)
LOADER = Bucketed(multiple=1)


def taken(loader: Bucketed | Inline, number: int, first_step: int = 0, batch_size: int = 8) -> list[Part]:
    batches = loader.batches(TEXTS, SameSize(batch_size), 0, first_step, CPU)
    parts = list(itertools.islice(batches, number))
    batches.close()
    return parts


def padding(parts: list[Part]) -> float:
    return 1 - sum(int(part.num_targets) for part in parts) / sum(part.targets.numel() for part in parts)


def test_there_is_much_less_padding_and_every_sample_once() -> None:
    parts = taken(LOADER, 25)
    assert padding(taken(Inline(), 25)) > 0.5
    assert padding(parts) < 0.1
    lengths = Counter(int((row != IGNORE).sum()) for part in parts for row in part.targets)
    assert lengths == Counter(LENGTHS)
    assert all(part.num_samples == 8 for part in parts)


def test_batches_come_in_a_random_order() -> None:
    widths = [part.targets.shape[1] for part in taken(LOADER, 25)]
    assert widths != sorted(widths)
    assert widths != sorted(widths, reverse=True)


def test_rows_are_a_multiple_but_never_longer_than_the_data() -> None:
    assert {part.targets.shape[1] for part in taken(Bucketed(multiple=12), 25)} <= {12, 24, 32}


def test_a_larger_pool_has_less_padding() -> None:
    found = [padding(taken(Bucketed(pool_batches=pool, multiple=1), 25)) for pool in (1, 4, 25)]
    assert found == sorted(found, reverse=True)
    assert found[0] > 2 * found[-1]


@pytest.mark.parametrize("loader", [LOADER, Bucketed(multiple=1, num_workers=2)], ids=repr)
@pytest.mark.parametrize("first_step", [0, 1, 24, 25, 61])
def test_resuming_at_any_step_gives_the_same_batches(loader: Bucketed, first_step: int) -> None:
    whole = taken(LOADER, first_step + 3)[first_step:]
    for one, other in zip(taken(loader, 3, first_step), whole, strict=True):
        assert all(map(torch.equal, one.tensors(), other.tensors()))


def test_no_sample_meets_itself_where_there_are_few() -> None:
    few = documents([length + 1 for length in LENGTHS[:24]], SPEC)
    for keys in itertools.islice(bucketed_keys(few, 8, 0, 0, 50), 3):
        assert len({index for index, _ in keys}) == 8


def test_the_slices_of_all_ranks_make_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = list(itertools.islice(bucketed_keys(TEXTS, 8, 0, 5, 50), 4))
    monkeypatch.setattr(Ranks, "size", 3)
    shares = []
    for each in range(3):
        monkeypatch.setattr(Ranks, "rank", each)
        shares.append(list(itertools.islice(LOADER.batches(TEXTS, SameSize(8), 0, 5, CPU), 4)))
    for parts, keys in zip(zip(*shares, strict=True), whole, strict=True):
        assert [part.num_samples for part in parts] == [3, 3, 2]
        assert {part.num_in_batch for part in parts} == {8}
        found = [row[row != IGNORE] for part in parts for row in part.targets]
        wanted = [targets[targets != IGNORE] for _, targets in itertools.starmap(TEXTS.sample, keys)]
        assert all(itertools.starmap(torch.equal, zip(found, wanted, strict=True)))


def test_texts_with_a_class_are_cut_too() -> None:
    data = LOADER.fit(PythonPackages(64, num_samples=400).open(seed=0), TRANSFORMER)
    batches = LOADER.batches(data.train, SameSize(8), 0, 0, CPU)
    for part in itertools.islice(batches, 20):
        assert part.inputs[IDS].shape == part.inputs[MASK].shape
        assert part.inputs[MASK].sum(1).max() == part.inputs[MASK].shape[1]
        assert part.inputs[MASK].float().mean() > 0.8
        assert part.targets.shape == (8,)


def test_the_length_of_a_drawn_text_is_what_is_drawn() -> None:
    texts = PythonPackages(64, num_samples=40).open(seed=0).train
    lengths = [texts.length(index, 2) for index in range(40)]  # pyright: ignore[reportAttributeAccessIssue]
    assert lengths == [int(texts.sample(index, 2)[0][MASK].sum()) for index in range(40)]


def test_few_shapes_are_reported() -> None:
    data = Data(SPEC, TEXTS, TEXTS, "")
    assert Bucketed(multiple=2).fit(data, TRANSFORMER).spec.has_few_shapes
    assert not Bucketed(multiple=1).fit(data, TRANSFORMER).spec.has_few_shapes


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (PythonSource(32), "inline or workers for samples that are all of one length: .* data.samples=documents"),
        (Glyphs(16), "inline or workers for images, which have no lengths"),
    ],
)
def test_samples_without_lengths_are_refused(source: Source, said: str) -> None:
    with pytest.raises(BadInput, match=f"loader='bucketed': must be {said}"):
        LOADER.fit(source.open(seed=0), TRANSFORMER)


def test_numbers_out_of_range() -> None:
    for name in ("pool_batches", "multiple", "prefetch"):
        with pytest.raises(BadInput, match=rf"loader\.{name}=0: must be at least 1"):
            Bucketed(**{name: 0})
