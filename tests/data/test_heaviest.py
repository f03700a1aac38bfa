"""The samples that make the heaviest batch."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import torch

from lowvram.core.rig import IGNORE
from lowvram.data.batch_sizes import SameSize
from lowvram.data.bucketed import Bucketed
from lowvram.data.heaviest import heaviest
from lowvram.data.loader import Inline
from lowvram.data.packed import Packed
from lowvram.data.source import Texts
from lowvram.data.spec import DECODER_IDS, DataSpec, Modality
from tests.data.test_pairs import opened
from tests.laboratory import CPU, documents, lengths_like

SPEC = DataSpec(Modality.TOKENS, 50, (32,))
LENGTHS = lengths_like(200, 32, torch.Generator().manual_seed(0))
TEXTS = documents([length + 1 for length in LENGTHS], SPEC)


def test_the_longest_texts_make_the_first_batch() -> None:
    for loader in (Bucketed(multiple=1), Inline(), Packed()):
        batches = loader.batches(heaviest(TEXTS, 8), SameSize(8), 0, 0, CPU)
        part = next(batches)
        batches.close()
        assert int(part.num_targets) == sum(sorted(LENGTHS)[-8:]), loader


def test_few_texts_are_taken_again() -> None:
    few = documents([5, 9, 3], SPEC)
    keys = list(islice(heaviest(few, 5).keys(0, 0), 5))
    assert keys == [(1, 0), (0, 0), (2, 0), (1, 0), (0, 0)]


def test_of_pairs_both_the_longest_of_each_are_taken(tmp_path: Path) -> None:
    """Of one row the first text is the longest, of another the second, and a third is longest in all."""
    words = [("abcdef", "x"), ("a", "xyz"), ("abcd", "xyz"[:2]), ("a", "x")]
    data = opened(tmp_path, [{"asked": asked, "said": said} for asked, said in words] * 5)
    assert isinstance(data.train, Texts)
    batches = Bucketed(multiple=1).batches(heaviest(data.train, 2), SameSize(2), 0, 0, CPU)
    part = next(batches)
    batches.close()
    assert part.inputs["input_ids"].shape[1] == 7
    assert part.inputs[DECODER_IDS].shape[1] == part.targets.shape[1] == 4
    assert int((part.targets != IGNORE).sum()) == 2 + 4


def test_other_samples_are_as_heavy_as_each_other() -> None:
    samples = object()
    assert heaviest(samples, 3) is samples  # pyright: ignore[reportArgumentType]
