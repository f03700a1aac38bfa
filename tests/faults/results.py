"""What a program has left that must be the same however often it was disturbed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lowvram.loops.snapshot import is_sound
from lowvram.results.row import _reported, read
from tests.calls import history

Results = dict[str, Any]
HASHED = re.compile(r"(step_\d+)\.[0-9a-f]{16}\.(?:pt|shards)$")
LEFT = re.compile(r"unfinished|\.tmp|~$")
DIFFERENT = re.compile(
    r"(.*/)?(native(\.\d+)?\.log|\.lowvram|table\.md|wandb.*|events\.out\.tfevents.*|disturbed-\d+\.jsonl?|diary\.txt)$"
)  # by name: there or not. The program writes the diary: if it dies, its run may still end by itself
TOLD = ("id", "index", "status", "reason", "choices", "loss", "eval", "model", "semantics_changed")  # of a row
PLANNED = ("allocated_bytes", "least_vram_bytes", "by_kind", "fits")


def results(work: Path, foreign: Iterable[Path] = ()) -> Results:
    """Of all runs below a folder: losses, metrics, weights, steps of snapshots; the rows of sweeps; names of files."""
    found: Results = {}
    for path in sorted(work.glob("**/result.json")):
        found[f"run {path.parent.relative_to(work)}"] = of_run(path.parent)
    for path in sorted(work.glob("**/rows.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        found[f"sweep {path.parent.relative_to(work)}"] = [about(row["row"]) for row in rows]
    found["files"] = names(work, set(foreign))
    return found


def without_choice(found: Results) -> Results:
    """Of points that are chosen by their speed: whether there are any, and what was left over."""
    ends = {run.get("status") for key, run in found.items() if key.startswith("run ")}
    left = [name for name in found["files"] if LEFT.search(name)]
    return {"found": "ok" in ends, "left": left}


def without_ids(found: Results) -> Results:
    """Of runs whose ids follow from where the folders are that they read."""
    return {key: {**run, "id": None} if key.startswith("run ") else run for key, run in found.items()}


def of_run(folder: Path) -> Results:
    row = read(folder)
    _reported.clear()  # of this process: a program that is forked from it says it too
    if row is None:
        return {"row": "no whole row"}
    weights = folder / "model" / "model.safetensors"
    return {
        **about(row),
        "metrics": lines_of(folder),
        "weights": hash_of(weights.read_bytes()) if weights.exists() else None,
    }


def hash_of(weights: bytes) -> str:
    """Of the tensors. Of two words in the header of the file, the library that writes it tosses which comes first."""
    size = int.from_bytes(weights[:8], "little")
    header, tensors = weights[8 : 8 + size], weights[8 + size :]
    with contextlib.suppress(ValueError):  # it is damaged: other bytes are another file
        header = json.dumps(json.loads(header), sort_keys=True).encode()
    return hashlib.sha256(header + tensors).hexdigest()


def lines_of(folder: Path) -> Any:
    try:
        return history(folder) if (folder / "metrics.jsonl").exists() else None
    except (ValueError, AttributeError):  # no JSON, or no keys and values
        return "damaged"


def about(row: Any) -> Results:
    fidelity = {key: value for key, value in (row["fidelity"] or {}).items() if not key.endswith("_s")}
    plan = {key: (row["plan"] or {}).get(key) for key in PLANNED}
    return {key: row[key] for key in TOLD} | {"fidelity": fidelity, "plan": plan}


def names(work: Path, foreign: set[Path]) -> list[str]:
    """Of all files; of snapshots the newest one's, and how many there are: which come before depends on interrupts."""
    files = [path for path in work.glob("**/*") if not (path.is_dir() or is_of_snapshot(path)) and path not in foreign]
    files += [path for path in work.glob("**/step_*.shards") if path.is_dir()]
    shown: list[str] = []
    snapshots: dict[Path, list[str]] = {}
    for path in files:
        match = HASHED.fullmatch(path.name)
        if match:
            snapshots.setdefault(path.parent.relative_to(work), []).append(match[1])
        if not match or not is_sound(path):
            shown.append(f"{path.relative_to(work)}{' (damaged)' if match else ''}")
    shown += [f"{folder}/{max(steps)}.pt" for folder, steps in snapshots.items()]
    shown += [f"{folder}/{len(steps)} snapshots" for folder, steps in snapshots.items()]
    return sorted(name for name in shown if not DIFFERENT.match(name))


def is_of_snapshot(path: Path) -> bool:
    """Whether it is a file of a snapshot that is a folder."""
    return HASHED.fullmatch(path.parent.name) is not None


def differences(wanted: Any, found: Any, where: str = "") -> list[str]:
    """Where two results differ, in words."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        keys = sorted({*wanted, *found}, key=str)
        return [
            told
            for key in keys
            for told in differences(wanted.get(key, "absent"), found.get(key, "absent"), f"{where}/{key}")
        ]
    if where == "/files" and isinstance(found, list):
        missing, more = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
        return [f"missing file {name}" for name in missing] + [f"left over file {name}" for name in more]
    if isinstance(wanted, list) and isinstance(found, list) and len(wanted) != len(found):
        return [f"{where}: {len(found)} instead of {len(wanted)}: {short([keys_of(one) for one in found])}"]
    if isinstance(wanted, list) and isinstance(found, list):
        pairs = enumerate(zip(wanted, found, strict=True))
        return [told for index, (one, other) in pairs for told in differences(one, other, f"{where}/{index}")]
    return [] if wanted == found else [f"{where}: {short(found)} instead of {short(wanted)}"]


def keys_of(line: Any) -> Any:
    """Of a line of metrics: its step and what it tells."""
    return (line["step"], *sorted(set(line) - {"step"})[:1]) if isinstance(line, dict) and "step" in line else line


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 300 else f"{text[:300]}..."
