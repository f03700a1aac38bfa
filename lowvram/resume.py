"""resume=last and resume=FOLDER: the command line of a run that is to be continued. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf

from lowvram.config import BadInput
from lowvram.results import row as rows
from lowvram.results.terminal import hydra_quoted


def with_resumed(words: list[str]) -> list[str]:
    """The words of the command line, those of the resumed run before those that were typed, which win.

    Raises:
        BadInput: there is nothing to continue.
    """
    asked = [word for word in words if word.startswith("resume=")]
    wanted = asked[-1].partition("=")[2].strip("'\"") if asked else "null"
    if wanted == "null":
        return words
    folder = newest_unfinished(words) if wanted == "last" else Path(wanted).expanduser()
    if not has_snapshots(folder):
        raise BadInput("resume", wanted, "last or the folder of a training run that left a snapshot")
    typed = [word for word in words if word not in asked]
    taken = {key(word) for word in typed}
    kept = [word for word in overrides_of(folder) if key(word) not in taken and key(word) != "resume"]
    where = hydra_quoted(f"{folder.resolve()}/").replace('/"', '"').rstrip("/")
    return [*kept, *typed, f"resume={where}", f"hydra.run.dir={where}"]


def key(word: str) -> str:
    """What an override sets: `+a.b=1` -> a.b"""
    return word.partition("=")[0].lstrip("+~")


def overrides_of(folder: Path) -> list[str]:
    """What was typed for the run (its swept values too)."""
    path = folder / ".hydra" / "overrides.yaml"
    if not path.exists():
        raise BadInput("resume", str(folder), f"the folder of a run: {path.name} is missing in its .hydra folder")
    return [str(word) for word in OmegaConf.load(path)]


def newest_unfinished(words: list[str]) -> Path:
    """The run below the outputs folder with the newest snapshot whose row isn't final."""
    outputs = next((word.partition("=")[2] for word in words if word.startswith("paths.outputs=")), "outputs")
    found = {
        file.parent.parent: file.stat().st_mtime
        for file in sorted(Path(outputs).glob("**/snapshots/step_*.pt"), key=lambda file: file.stat().st_mtime)
    }
    for folder in sorted(found, key=found.__getitem__, reverse=True):
        row = rows.read(folder)
        if row is None or not rows.is_final(row):
            return folder
    raise BadInput("resume", "last", f"a folder: no unfinished run below {outputs} has a snapshot")


def has_snapshots(folder: Path) -> bool:
    return any(folder.glob("snapshots/step_*.pt"))
