"""resume=last and resume=FOLDER: the command line of a run that is to be continued. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from lowvram.config import BadInput
from lowvram.results import row as rows
from lowvram.results.terminal import hydra_quoted, shown_path

MULTIRUN = ("-m", "--multirun")


@dataclass(frozen=True)
class Resumed:
    """The words of the command line, with those of the run that they continue."""

    words: list[str]
    notes: dict[Path, bytes] = field(default_factory=dict)  # what Hydra had noted of the run that was there

    def moved(self, folder: Path) -> Resumed:
        """The same run, but Hydra leaves nothing in its folder."""
        elsewhere = {"hydra.run.dir": hydra_quoted(str(folder)), "hydra.output_subdir": "null"}
        kept = [word for word in self.words if key(word) not in elsewhere]
        return Resumed([*kept, *(f"{name}={value}" for name, value in elsewhere.items())])

    def put_back(self) -> None:
        """The continuation was refused: the run is as it was."""
        for path, content in self.notes.items():
            path.write_bytes(content)


def with_resumed(words: list[str]) -> Resumed:
    """The words of the command line, those of the resumed run before those that were typed, which win.

    Raises:
        BadInput: there is nothing to continue.
        HydraException: a word that can't be read.
    """
    wanted = typed_value(words, "resume")
    if wanted is None:
        return Resumed(words, notes_of(Path(typed_value(words, "hydra.run.dir") or "")))
    if not set(words).isdisjoint(MULTIRUN):
        raise BadInput("resume", wanted, "typed without -m: a sweep goes on with the same words and hydra.sweep.dir")
    folder = newest_unfinished(words) if wanted == "last" else Path(wanted).expanduser()
    if not has_snapshots(folder):
        raise BadInput("resume", wanted, "last or the folder of a training run that left a snapshot")
    typed = [word for word in words if key(word) != "resume"]
    taken = {"resume", *map(key, typed)}
    kept = [word for word in overrides_of(folder) if key(word) not in taken]
    where = hydra_quoted(str(folder.resolve()))
    # One run, also if a preset of its words makes a sweep.
    again = [*kept, *typed, f"resume={where}", f"hydra.run.dir={where}", "hydra.mode=RUN"]
    return Resumed(again, notes_of(folder))


def key(word: str) -> str:
    """What an override sets: `+a.b=1` -> a.b"""
    return word.partition("=")[0].lstrip("+~")


def typed_value(words: list[str], wanted: str) -> str | None:
    """What was typed for a key, without Hydra's quotes; None for null, and if it was not."""
    typed = [word for word in words if key(word) == wanted]
    value = OverridesParser.create().parse_overrides(typed[-1:])[0].value() if typed else None
    return None if value is None else str(value)


def overrides_of(folder: Path) -> list[str]:
    """What was typed for the run (its swept values too)."""
    path = folder / ".hydra" / "overrides.yaml"
    if not path.exists():
        raise BadInput("resume", str(folder), f"the folder of a run: {path.name} is missing in its .hydra folder")
    return [str(word) for word in OmegaConf.to_container(OmegaConf.load(path)) or ()]


def newest_unfinished(words: list[str]) -> Path:
    """The run below the outputs folder with the newest snapshot whose row isn't final."""
    outputs = typed_value(words, "paths.outputs") or "outputs"
    snapshots = Path(outputs).glob("**/snapshots/step_*.pt")
    newest_first = sorted(snapshots, key=lambda file: file.stat().st_mtime, reverse=True)
    for folder in dict.fromkeys(file.parent.parent for file in newest_first):
        row = rows.read(folder)
        if row is None or not rows.is_final(row):
            return folder
    raise BadInput("resume", "last", f"a folder: no unfinished run below {outputs} has a snapshot")


def notes_of(folder: Path) -> dict[Path, bytes]:
    """What Hydra has noted of a run: nothing where none is."""
    return {path: path.read_bytes() for path in folder.glob(".hydra/*")}


def check_new(folder: Path) -> None:
    """Refuse to start a run where there is one."""
    if holds_run(folder):
        instead = f"; resume={hydra_quoted(shown_path(folder))} goes on with this one" if has_snapshots(folder) else ""
        raise BadInput("hydra.run.dir", shown_path(folder), f"a folder that holds no run yet{instead}")


def holds_run(folder: Path) -> bool:
    """Whether a folder has what a run leaves."""
    return rows.read(folder) is not None or has_snapshots(folder)


def has_snapshots(folder: Path) -> bool:
    return any(folder.glob("snapshots/step_*.pt"))
