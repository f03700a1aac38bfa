"""The way from the command line to the first step: which files it goes through, in order.

    scripts/python scripts/pages/hops.py            # a tiny Transformer
    scripts/python scripts/pages/hops.py model=resnet precision=bf16

Runs a point in this process and prints a line for each file of the package that is entered for the first time, with the
function that is called there, and how often the file was entered before the first `step`. Calls while a module is
imported, and those of generated code, don't count.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = str(ROOT / "lowvram")
TINY = ("model.num_layers=1", "model.width=32", "model.num_heads=2", "data=synthetic", "data.sequence_length=16")
TINY += ("data.eval_samples=4", "train.batch_size=4", "train.steps=1", "logger=none", "device=cpu", "process=inline")
IGNORED = ("<module>", "<lambda>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")


class Hops:
    """Calls from file to file, until the first step."""

    def __init__(self) -> None:
        self.first: dict[str, str] = {}  # by file, the function that was called first
        self.entered: Counter[str] = Counter()
        self.num_functions: set[tuple[str, str]] = set()
        self.is_done = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or self.is_done:
            return
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if not file.startswith(PACKAGE) or name in IGNORED or is_importing(frame):
            return
        if file.endswith("core/step.py") and name == "step":
            self.is_done = True
            sys.setprofile(None)
        self.num_functions.add((file, frame.f_code.co_qualname))
        if caller_of(frame) != file:
            self.entered[file] += 1
            self.first.setdefault(file, frame.f_code.co_qualname)


def caller_of(frame: FrameType) -> str | None:
    """The file of the package from which a call came, through whatever library."""
    before = frame.f_back
    while before is not None and not before.f_code.co_filename.startswith(PACKAGE):
        before = before.f_back
    return None if before is None else before.f_code.co_filename


def is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(PACKAGE):
            return True
        frame = frame.f_back
    return False


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from lowvram.cli.main import main as command_line

    hops = Hops()
    with TemporaryDirectory() as folder:
        sys.argv = ["train.py", *TINY, f"hydra.run.dir={folder}/run", *sys.argv[1:]]
        sys.setprofile(hops)
        try:
            command_line()
        except SystemExit:
            pass
        finally:
            sys.setprofile(None)
    if not hops.is_done:
        sys.exit("no step was taken")
    for number, (file, name) in enumerate(hops.first.items(), 1):
        print(f"{number:3}  {Path(file).relative_to(PACKAGE)!s:36} {name:40} entered {hops.entered[file]}x")
    again = sum(num > 2 for num in hops.entered.values())
    print(
        f"{len(hops.num_functions)} functions in {len(hops.first)} files, {sum(hops.entered.values())} calls from file "
        f"to file; {again} files are entered more than twice"
    )


if __name__ == "__main__":
    main()
