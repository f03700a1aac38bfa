"""Which cases `scripts/test` leaves to `scripts/test all`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from tests.tiers import MEDIUM, ROOT, SAMPLED, sample


@dataclass
class Single:
    """What `sample` asks of a test without cases."""

    path: Path
    originalname: str
    marks: list[str] = field(default_factory=list)

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None

    def add_marker(self, name: str) -> None:
        self.marks.append(name)


@dataclass
class Case(Single):
    callspec: object = None


def test_each_nth_case_of_a_test_stays() -> None:
    file = ROOT / "test_laws_of_pairs.py"
    one, other = ([Case(file, name) for _ in range(5)] for name in ("one", "other"))
    slow, elsewhere = Case(file, "one", ["slow"]), [Case(ROOT / "test_laws.py", "one") for _ in range(5)]
    single = [Single(file, "third") for _ in range(2)]
    mixed: list[Any] = [slow, *(item for two in zip(one, other, strict=True) for item in two), *elsewhere, *single]
    sample(cast("Any", mixed))
    for cases in (one, other):
        assert [item.marks for item in cases] == [[], ["slow"], ["slow"], [], ["slow"]]
    assert slow.marks == ["slow"]
    assert not any(item.marks for item in [*elsewhere, *single])


def test_the_files_are_there() -> None:
    assert not [name for name in [*MEDIUM, *SAMPLED] if not (ROOT / f"{name}.py").is_file()]
