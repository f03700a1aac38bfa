"""Who may import whom, read off the sources; and what stays small."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "lowvram").rglob("*.py"))
# What the modules of a package may import from this project, besides themselves.
MAY_IMPORT = {
    "lowvram.core": ("lowvram.config", "lowvram.core"),
    "lowvram.knobs": ("lowvram.config", "lowvram.core"),
    "lowvram.models": (
        "lowvram.config",
        "lowvram.core.quiet",
        "lowvram.core.seeds",
        "lowvram.data.spec",
        "lowvram.found",
        "lowvram.reach",
        "lowvram.secret",
        *(f"lowvram.models.{base}" for base in ("own", "attention", "foreign", "survey", "layout")),
        *(f"lowvram.models.hf_{base}" for base in ("layout", "packed", "source")),
    ),
}
# The parent's modules: with torch they would take seconds to start and would share the measured memory.
TORCH_FREE = {
    "lowvram": (
        "cli coming composed config defaults durable fidelity folders growing hydra_hooks hydra_notes identity inline "
        "lengths manifest marker mistakes planning point recording remeasuring resume run_folder runs searching secret "
        "settings start sweeper table verdict winner"
    ),
    "lowvram.planner": "allocator blocks devices hidden recorded replay",
    "lowvram.results": (
        "accuracy advice band columns curves differences doubts evidence live_table metric_lines metrics planned "
        "report row sealed shown sound table terminal wandb"
    ),
    "lowvram.process": "client crew descendants events frames inline launch native_log orders patience server",
}
PARENTS = {f"{package}.{name}" for package, names in TORCH_FREE.items() for name in names.split()}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path) -> Iterator[str]:
    """Every module that a file imports anywhere, for types alone too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the direction"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_go_one_way(path: Path) -> None:
    name = module_name(path)
    ours = [module for module in imported(path) if is_within(module, ("lowvram",))]
    for package, allowed in MAY_IMPORT.items():
        if is_within(name, (package,)):
            group = ".".join(name.split(".")[:3])  # a knob's group may be a package
            assert all(is_within(module, (*allowed, group)) for module in ours), ours


def test_core_needs_nothing_but_torch() -> None:
    for path in (ROOT / "lowvram" / "core").glob("*.py"):
        others = {module.partition(".")[0] for module in imported(path)} - set(sys.stdlib_module_names)
        assert others <= {"torch", "lowvram"}, path


def test_nothing_below_the_modes_knows_them() -> None:
    for path in SOURCES:
        name = module_name(path)
        if is_within(name, ("lowvram.core", "lowvram.knobs", "lowvram.models", "lowvram.data", "lowvram.tasks")):
            assert not any(is_within(module, ("lowvram.modes", "lowvram.process")) for module in imported(path)), name


def test_modules_of_the_parent_import_no_torch() -> None:
    show = "print({'torch', 'numpy', 'datasets', 'wandb', 'matplotlib'} & set(sys.modules))"
    program = f"import sys, train, {', '.join(sorted(PARENTS))}; {show}"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_every_module_that_promises_so_is_among_them() -> None:
    promised = {module_name(path) for path in SOURCES if "mports no torch" in path.read_text()}
    assert promised <= PARENTS | {"lowvram.results"}


def test_there_is_one_training_step_and_one_place_for_backward() -> None:
    """Outside it only steppers go backward."""
    callers = {module_name(path) for path in SOURCES if calls(path, "backward")}
    assert callers == {
        "lowvram.core.phases",  # a stepper around another, with marks
        "lowvram.core.rig",  # asks the stepper
        "lowvram.knobs.precision.autocast",  # a stepper around another
        "lowvram.knobs.stepping.after_backward",  # this one and the next two do it
        "lowvram.knobs.stepping.cpu_offload",
        "lowvram.knobs.stepping.in_backward",
    }


def calls(path: Path, method: str) -> bool:
    nodes = ast.walk(ast.parse(path.read_text()))
    return any(isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == method for n in nodes)


def test_nothing_asks_what_it_should_know() -> None:
    """An interface says what an object has."""
    assert not [module_name(path) for path in SOURCES if "hasattr(" in path.read_text()]


def test_the_entry_is_short() -> None:
    assert len((ROOT / "train.py").read_text().splitlines()) <= 30
