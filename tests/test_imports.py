"""Who may import whom, read off the sources: rooms on floors, and imports that go downwards only."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from lowvram.config.settings import KNOB_GROUPS

ROOT = Path(__file__).parents[1]
PACKAGE = "lowvram"
# The rooms, top floor first. A module imports from its own room and from those on lower floors.
FLOORS = (
    {""},
    {"api", "report", "table"},  # what users import or call
    {"cli", "worker"},  # the two entries: the parent and its children
    {"search"},
    {"runs"},
    {"fidelity"},
    {"planning"},
    {"compress"},  # a plug-in that we ship: below it, nothing knows what it holds
    {"launch", "loops"},
    {"tasks"},
    {"models"},
    {"data"},
    {"knobs", "results"},
    {"core"},
    {"config"},
    {"compat"},
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# The parent's: with torch they would take seconds to start and would share the measured memory.
TORCH_FREE = ("cli.", "runs.", "launch.", "results.", "config.", "table.", "report.", "planning.memory.")
TORCH_FREE_MODULES = {
    "compat.hydra",
    "compat.threads",
    "compat.torch_compiler",
    "fidelity.band",
    "fidelity.client",
    "planning.client",
    "planning.devices",
    "search.client",
    "search.largest",
    "search.result",
    "search.solve",
}
HEAVY = {"torch", "numpy", "datasets", "wandb", "matplotlib", "transformers"}


def module_name(path: Path) -> str:
    """Inside the package: "core.rig"; "" is the package itself."""
    parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES: Mapping[str, Path] = {module_name(path): path for path in sorted((ROOT / PACKAGE).rglob("*.py"))}


def room_of(name: str) -> str:
    return name.partition(".")[0]


def imported(nodes: Iterator[ast.AST], path: Path) -> Iterator[str]:
    """Every dotted name that import statements among `nodes` name."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the direction"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def all_imports(name: str) -> frozenset[str]:
    """Of a module, anywhere in it, for types alone too."""
    return frozenset(imported(ast.walk(ast.parse(SOURCES[name].read_text())), SOURCES[name]))


@cache
def imports_at_start(name: str) -> frozenset[str]:
    """Of a module, when it is imported."""
    return frozenset(imported(iter(ast.parse(SOURCES[name].read_text()).body), SOURCES[name]))


def ours(names: frozenset[str]) -> set[str]:
    """The modules of the package among dotted names, which may go on with a name inside the module."""
    inside = {name.removeprefix(PACKAGE).removeprefix(".") for name in names if room_of(name) == PACKAGE}
    return {name if name in SOURCES else name.rpartition(".")[0] for name in inside}


def test_imports_go_down_the_floors() -> None:
    upwards = [
        f"{name} -> {other}"
        for name in SOURCES
        for other in ours(all_imports(name))
        if room_of(name) != room_of(other) and FLOOR_OF[room_of(other)] <= FLOOR_OF[room_of(name)]
    ]
    assert not upwards


def test_what_makes_models_smaller_is_known_by_its_seams_alone() -> None:
    """YAMLs name its classes, as those of anybody's plug-in, and one module its formats."""
    others = {name for name in SOURCES if room_of(name) != "compress"}
    assert not [name for name in others if any(room_of(other) == "compress" for other in ours(all_imports(name)))]
    named = {name for name in others if f"{PACKAGE}.compress" in SOURCES[name].read_text()}
    assert named == {"loops.export.folder", "config.schema"}


def test_no_modules_import_each_other() -> None:
    graph = {name: ours(all_imports(name)) - {name} for name in SOURCES}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_a_knob_imports_no_other_knob() -> None:
    for name in SOURCES:
        group = ".".join(name.split(".")[:2])  # it may be a package
        if room_of(name) == "knobs" or group in ("compress.qat", "compress.sparsity"):
            others = [other for other in ours(all_imports(name)) if room_of(other) in ("knobs", "compress")]
            assert all(f"{other}.".startswith(f"{group}.") for other in others), name


NAMED = {"loops.session": {"accum", "optimizer"}, "loops.setup": {"allocator"}}  # not yet said by the knobs themselves


def test_loops_and_fidelity_name_no_knob() -> None:
    """What a knob has to say, it says through the class `Knob`, or by what it put into the rig."""
    for name, path in SOURCES.items():
        if room_of(name) in ("loops", "fidelity"):
            named = set(re.findall(r"""groups\[["'](\w+)["']\]""", path.read_text())) & set(KNOB_GROUPS)
            assert named <= NAMED.get(name, set()), f"{name}: {named}"


def test_core_needs_nothing_but_torch() -> None:
    """Triton comes with torch for cards; only kernels ask for it."""
    for name in SOURCES:
        if room_of(name) == "core":
            assert {room_of(other) for other in all_imports(name)} - set(sys.stdlib_module_names) <= (
                {"torch", "triton", PACKAGE} if name == "core.kernels" else {"torch", PACKAGE}
            )


def torch_free() -> set[str]:
    return {name for name in SOURCES if f"{name}.".startswith(TORCH_FREE) or name in TORCH_FREE_MODULES}


def test_no_torch_is_within_reach_of_the_parent() -> None:
    for start in torch_free():
        seen, ahead = {start}, [start]
        while ahead:
            name = ahead.pop()
            heavy = {room_of(other) for other in imports_at_start(name)} & HEAVY
            assert not heavy, f"{start} reaches {name}, which imports {heavy}"
            # A package runs before its modules.
            found = {other for module in ours(imports_at_start(name)) for other in (module, *packages_of(module))}
            ahead += found - seen
            seen |= found


def packages_of(module: str) -> Iterator[str]:
    parts = module.split(".")
    yield from (".".join(parts[:num]) for num in range(len(parts)))


def test_the_parent_imports_no_torch() -> None:
    """What the sources say, seen in a process."""
    modules = ", ".join(f"{PACKAGE}.{name}" for name in sorted(torch_free()))
    program = f"import sys, train, {modules}; print({HEAVY} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_every_module_that_promises_so_is_free_of_torch() -> None:
    promised = {name for name, path in SOURCES.items() if "mports no torch" in path.read_text()}
    assert promised <= torch_free()


def test_every_room_says_what_lives_there() -> None:
    for name, path in SOURCES.items():
        if path.name == "__init__.py":
            assert len(ast.get_docstring(ast.parse(path.read_text())) or "") > 40, name


def test_the_house_is_small() -> None:
    entries = [path for path in (ROOT / PACKAGE).iterdir() if path.name != "__pycache__"]
    assert len(entries) <= 21


def test_there_is_one_training_step_and_one_place_for_backward() -> None:
    """Outside it only steppers go backward."""
    assert {name for name in SOURCES if calls(name, "backward")} == {
        "compat.torch_pipelining",  # asks what stands in the next line
        "knobs.sharding.pipeline_run",  # asks the stepper
        "knobs.sharding.held_back",  # of a weight alone: adds what a stepper's backward pass has left for later
        "core.phases",  # a stepper around another, with marks
        "core.rig",  # asks the stepper
        "core.stepper",  # one around another
        "knobs.adapter.over_time",  # a stepper around another, which leaves out parts in which nothing trains
        "planning.trace.plain_loop",  # a stepper around another
        "loops.noise_scale",  # a stepper around another, which measures gradients
        "loops.skipping",  # another, which undoes steps
        "knobs.precision.autocast",  # a stepper around another
        "knobs.stepping.after_backward",  # this one and the next two do it
        "knobs.stepping.cpu_offload",
        "knobs.stepping.strategies",  # of in_backward
        "knobs.tile.chunks",  # inside a backward pass: through the graph of one chunk
        "core.probes.alone",  # of a copy of a block, which learns nothing
        "core.probes.token_trial",  # of copies with random weights
    }


def calls(name: str, method: str) -> bool:
    nodes = ast.walk(ast.parse(SOURCES[name].read_text()))
    return any(isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == method for n in nodes)


def test_nothing_asks_what_it_should_know() -> None:
    """An interface says what an object has."""
    assert not [name for name, path in SOURCES.items() if "hasattr(" in path.read_text()]


def test_the_entry_is_short() -> None:
    assert len((ROOT / "train.py").read_text().splitlines()) <= 30
