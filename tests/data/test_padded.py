from __future__ import annotations

import numpy as np
import pytest

from lowvram.data.padded import padded
from lowvram.data.spec import TextRules

PLAIN, ENDED = TextRules(pad_id=9), TextRules(pad_id=9, end_id=1)


@pytest.mark.parametrize(
    ("rules", "tokens", "ids", "num_kept"),
    [
        (PLAIN, [5, 6], [5, 6, 9, 9], 2),
        (PLAIN, [5, 6, 7, 8, 5], [5, 6, 7, 8], 4),
        (PLAIN, [], [9, 9, 9, 9], 0),
        (ENDED, [5, 6], [5, 6, 1, 9], 3),
        (ENDED, [5, 6, 1], [5, 6, 1, 9], 3),
        (ENDED, [5, 6, 7, 8], [5, 6, 7, 1], 4),
        (ENDED, [5, 6, 7, 8, 1], [5, 6, 7, 1], 4),
        (ENDED, [], [1, 9, 9, 9], 1),
    ],
)
def test_a_text_is_cut_ended_and_filled_up(rules: TextRules, tokens: list[int], ids: list[int], num_kept: int) -> None:
    found = padded(np.array(tokens, np.uint8), 4, rules)
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "input_ids": ids,
        "attention_mask": [1] * num_kept + [0] * (4 - num_kept),
    }


def test_an_end_that_no_byte_can_be() -> None:
    assert padded(np.array([5], np.uint8), 3, TextRules(end_id=50_000))["input_ids"].tolist() == [5, 50_000, 0]
