"""Which cases `scripts/test` leaves to `scripts/test all`."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.tiers import MEDIUM, ROOT, SAMPLED, sample


@dataclass
class Single:
    """What `sample` asks of a test without cases."""

    path: Path
    originalname: str
    marks: list[pytest.Mark] = field(default_factory=list)

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, name: str) -> None:
        self.marks.append(getattr(pytest.mark, name).mark)

    @property
    def is_slow(self) -> bool:
        return self.get_closest_marker("slow") is not None


@dataclass
class Case(Single):
    callspec: Any = None
    name: str = ""


HERE = ROOT / "test_somewhere.py"


def sampled(*args: int) -> list[pytest.Mark]:
    return [pytest.mark.sampled(*args).mark if args else pytest.mark.sampled.mark]


def cases_of(name: str, marks: list[pytest.Mark], num: int) -> list[Case]:
    return [Case(HERE, name, [*marks], SimpleNamespace(params={"number": i}), f"{name}[{i}]") for i in range(num)]


def test_each_nth_case_of_a_test_stays() -> None:
    one, other, elsewhere = (
        cases_of(name, marks, 5) for name, marks in (("a", sampled(3)), ("b", sampled(3)), ("c", []))
    )
    slow, single = cases_of("a", [*sampled(3), pytest.mark.slow.mark], 1), [Single(HERE, "d", sampled(3))]
    mixed: list[Any] = [*slow, *(item for two in zip(one, other, strict=True) for item in two), *elsewhere, *single]
    sample(cast("Any", mixed))
    for cases in (one, other):
        assert [item.is_slow for item in cases] == [False, True, True, False, True]
    assert slow[0].is_slow
    assert not any(item.is_slow for item in [*elsewhere, *single])


def test_each_value_of_a_parameter_stays_in_some_case() -> None:
    options, others, models = [{"no": "hash"}, ("a", 1), "b", 1], [None, True], ["transformer", "resnet", "vit"]
    cases = [
        Case(
            HERE, "a", sampled(), SimpleNamespace(params={"option": option, "other": other, "model": model}), f"a[{i}]"
        )
        for i, (option, other, model) in enumerate(product(options, others, models))
    ]
    sample(cast("Any", cases))
    left = [case.callspec.params for case in cases if not case.is_slow]
    assert 4 <= len(left) <= 8
    for name, values in (("option", options), ("other", others), ("model", models)):
        assert all(any(case[name] is value for case in left) for value in values)


def test_the_files_are_there() -> None:
    assert not [name for name in [*MEDIUM, *SAMPLED] if not (ROOT / f"{name}.py").is_file()]
