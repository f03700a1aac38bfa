"""The result of a search: the winner's predicted and measured figures, as a command and as a file. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lowvram.config.words import key
from lowvram.results.files.durable import write_text
from lowvram.results.planned import ms_text
from lowvram.results.row import Row, Status, size_text
from lowvram.results.terminal import command_line, shown_path

NAME = "winner"
OF_THE_SEARCH = ("mode", "search", "solve", "jobs", "hydra", "plan")  # keys that only the search needs


def sort_key(row: Row) -> tuple[bool, float]:
    """Sorts the best row first: rows that ran, by the measured time of a sample, else the planned time of a step."""
    samples_per_s = row["throughput"]["samples_per_s"]
    return row["status"] != Status.OK, 1 / samples_per_s if samples_per_s else row["plan"]["step_ms"]


def with_changes(words: Sequence[str], changes: Mapping[str, str]) -> list[str]:
    """The typed words without those that only the search needs, plus the options that it has chosen."""
    kept = [word for word in words if key(word).partition(".")[0] not in OF_THE_SEARCH and key(word) not in changes]
    return [*kept, *" ".join(f"{group}={option}" for group, option in changes.items()).split()]


def report(folder: Path, words: Sequence[str], best: Row, changes: Mapping[str, str]) -> list[str]:
    """Write the winner's file; returns the last lines that the search prints.

    Args:
        changes: the winner's options that differ from the typed ones, each with the words that belong to it.
    """
    if best["status"] != Status.OK:
        return ["no measured candidate ran to its end"]
    write_file(folder, best, changes)
    experiments = [word.partition("=")[2] for word in words if key(word) == "experiment"]
    names = f"[{','.join([*experiments, NAME])}]" if experiments else NAME
    rest = [word for word in with_changes(words, {}) if key(word) not in (*changes, "experiment")]
    path = shown_path(folder)
    return [
        f"the fastest: {described(best)}",
        f"  {command_line(*with_changes(words, changes))}",
        "the same from a file:",
        f"  {command_line('--config-dir', path, f'experiment={names}', *rest)}",
    ]


def described(best: Row) -> str:
    """A line with the measured and the planned figures of the winner."""
    plan, memory, measured_ms = best["plan"], best["memory"]["peak_bytes"], best["time"]["step_ms_p50"]
    if memory is None:
        needed = f"needs {size_text(plan['least_vram_bytes'])}, about {ms_text(plan['step_ms'])} ms a step, as planned"
        return f"{best['name']}: {needed}"
    sizes = f"{size_text(memory)} (planned {size_text(plan['allocated_bytes'])})"
    times = f"{ms_text(measured_ms)} ms a step (planned {ms_text(plan['step_ms'])})"
    rate = f"{best['throughput']['samples_per_s']:.3g} samples/s"
    return f"{best['name']}: {sizes}, {times}, {rate}{'' if plan['fits'] else despite_plan(best)}"


def despite_plan(best: Row) -> str:
    """What is said of a winner whose plan doesn't fit with its margin."""
    return f"; it ran under vram={best['config']['vram']}, though its plan doesn't fit with its margin"


def write_file(folder: Path, best: Row, changes: Mapping[str, str]) -> None:
    """Write the options that were chosen as an experiment, as in conf/experiment."""
    words = [word.partition("=") for word in with_changes((), changes)]
    options = [f"  - override /{group}: {option}\n" for group, _, option in words if "." not in group]
    lines = [f"# @package _global_\n# Found by mode=search: {described(best)}.\n"]
    lines += ["defaults:\n", *options] if options else []
    for group in dict.fromkeys(name.partition(".")[0] for name, _, _ in words if "." in name):
        values = [(name, value) for name, _, value in words if name.startswith(f"{group}.")]
        lines += [f"{group}:\n", *(f"  {name.partition('.')[2]}: {value}\n" for name, value in values)]
    (folder / "experiment").mkdir(exist_ok=True)
    write_text(folder / "experiment" / f"{NAME}.yaml", "".join(lines))
