"""Which blocks are compared, and which are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lowvram.compress.distillation.matching import Call, evenly, find_matches
from lowvram.compress.distillation.task import Distill
from lowvram.config.errors import BadInput
from lowvram.config.schema import build
from lowvram.tasks import Auto, Problem
from tests.compress.distillation.teachers import DEEPER, TEACHERS, distilled
from tests.compress.distillation.test_cache import written
from tests.laboratory import IMAGES, PROBLEMS, RESNET, TOKENS, TRANSFORMER


@pytest.mark.parametrize(
    ("num_ours", "num_theirs", "wanted"),
    [
        (3, 3, [0, 1, 2]),
        (2, 4, [1, 3]),
        (3, 12, [3, 7, 11]),
        (1, 5, [4]),
        (3, 5, [1, 3, 4]),
        (4, 2, [0, 0, 1, 1]),  # a student that is deeper than its teacher
        (2, 0, []),
    ],
)
def test_blocks_are_spread_evenly(num_ours: int, num_theirs: int, wanted: list[int]) -> None:
    assert list(evenly([*range(num_ours)], [*range(num_theirs)]).values()) == wanted


def residual(layers: list[int], **sizes: Any) -> Problem:
    return Auto().pose(replace(RESNET, layers=layers, **sizes), IMAGES)


def found(student: Problem, teacher: Problem, chosen: list[int] | None = None) -> dict[Call, Call]:
    return {ours: partner.call for ours, partner in find_matches(student, teacher, 1.0, chosen).items()}


@pytest.mark.parametrize(
    ("student", "teacher", "chosen", "wanted"),
    [
        (PROBLEMS["transformer"], DEEPER["transformer"], None, {0: 1, 1: 3, 2: 4}),
        (PROBLEMS["transformer"], DEEPER["transformer"], [0, 2], {0: 1, 2: 4}),
        (residual([2, 2]), residual([3, 4]), None, {0: 1, 1: 2, 2: 4, 3: 6}),  # never with another stage
        (residual([1, 3]), residual([3, 1]), None, {0: 2, 1: 3, 2: 3, 3: 3}),
        (residual([2, 2]), residual([3, 4], width=16), None, {0: 1, 1: 2, 2: 4, 3: 6}),  # whatever their widths
    ],
)
def test_blocks_of_as_many_places_are_compared(
    student: Problem, teacher: Problem, chosen: list[int] | None, wanted: dict[int, int]
) -> None:
    assert found(student, teacher, chosen) == {Call(ours, 0): Call(theirs, 0) for ours, theirs in wanted.items()}


def test_each_call_of_a_block_that_is_called_repeatedly_is_compared() -> None:
    shared = Auto().pose(replace(TRANSFORMER, num_layers=3, num_distinct_layers=2), TOKENS)
    ours = [Call(0, 0), Call(1, 0), Call(0, 1)]
    assert found(shared, PROBLEMS["transformer"]) == dict(zip(ours, calls(0, 1, 2), strict=True))
    assert found(PROBLEMS["transformer"], shared, [1, 2]) == dict(zip(calls(1, 2), ours[1:], strict=True))


def calls(*numbers: int) -> list[Call]:
    return [Call(number, 0) for number in numbers]


def test_widths_are_those_of_tokens_and_of_pixels() -> None:
    for model, widths in (("transformer", {(24, 16)}), ("resnet", {(16, 8), (32, 16)})):
        matches = find_matches(PROBLEMS[model], TEACHERS[model], 1.0, None)
        assert {(partner.width, partner.student_width) for partner in matches.values()} == widths


def test_other_sizes_of_images_are_refused_with_both() -> None:
    larger = Auto().pose(replace(RESNET, image_size=32), replace(IMAGES, shape=(3, 32, 32)))
    what = r"blocks return .* they are 8x4x4 and 16x2x2 here and 8x16x16 and 16x8x8 in the teacher; choose another"
    with pytest.raises(BadInput, match=rf"^task\.feature_weight=0\.5: must be 0, unless {what}"):
        distilled("resnet", larger, feature_weight=0.5)


def test_a_block_without_a_counterpart_is_refused() -> None:
    with pytest.raises(
        BadInput, match=r"^task\.features=\[0, 7\]: must be numbers .*: of this model some of \[0, 1, 2\]$"
    ):
        distilled("transformer", DEEPER["transformer"], feature_weight=0.5, features=[0, 7])


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"feature_weight": -0.1}, r"task\.feature_weight=-0\.1: must be at least 0"),
        ({"feature_weight": float("nan")}, r"task\.feature_weight=.*nan"),
        ({"feature_weight": 1.0, "cache": "there"}, r"task\.feature_weight=1\.0: must be 0 with task\.cache"),
        ({"features": []}, r"task\.features=\[\]: must be null"),
        ({"features": [2, 1]}, r"task\.features=\[2, 1\]"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused(values: dict[str, Any], what: str) -> None:
    with pytest.raises(BadInput, match=what):
        Distill(**{"teacher": "somewhere", **values})


def test_a_cache_and_features_are_refused() -> None:
    target = f"{Distill.__module__}.Distill"
    with pytest.raises(BadInput, match=r"^task\.feature_weight=0\.5: must be 0 with task\.cache"):
        build(OmegaConf.create({"_target_": target, "cache": "somewhere", "feature_weight": 0.5}), "task")


def test_a_cache_of_predictions_takes_no_features(tmp_path: Path) -> None:
    problem = distilled("transformer", DEEPER["transformer"], feature_weight=0.5)
    with pytest.raises(BadInput, match=r"^task\.feature_weight=0\.5: must be 0 with mode=teach"):
        written(tmp_path, problem)
    assert not (tmp_path / "cache").exists()
