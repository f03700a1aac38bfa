"""scripts/benchmarks/contestants.py: processes that run side by side."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.benchmarks.contestants import Case, apart

CASE = Case("tiny", "gpt2", "causal_lm", {"vocab_size": 8}, ("train.batch_size=1",), 1)
PROGRAM = """
import json, sys, time
from scripts.benchmarks.contestants import meet

name = sys.argv[sys.argv.index("--perform") + 2]
if name == "broken":
    sys.exit("it broke")
time.sleep(name == "late")
came_s = time.monotonic()
meet()
print("a word of somebody else's")
print(json.dumps({"name": name, "came_s": came_s, "left_s": time.monotonic()}))
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def test_nobody_goes_on_before_all_have_come(program: str, tmp_path: Path) -> None:
    names = ["early", "late", "another"]
    told = apart(program, names, CASE, tmp_path, 1, 1)
    assert [each["name"] for each in told] == names
    assert min(each["left_s"] for each in told) >= told[1]["came_s"]


def test_who_is_alone_waits_for_nobody(program: str, tmp_path: Path) -> None:
    (told,) = apart(program, ["early"], CASE, tmp_path, 1, 1)
    assert told["left_s"] - told["came_s"] < 1.0


def test_nobody_waits_for_one_who_failed(program: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="it broke"):
        apart(program, ["early", "broken"], CASE, tmp_path, 1, 1)
