"""Files of somebody else, in and around the folders where a program works: after a trial they are as before."""

from __future__ import annotations

import os
from pathlib import Path

Look = tuple[int, int, bytes]  # mode, time of the last change, content
AROUND = ("notes.txt", "outputs/results.csv", "outputs/.hydra_backup/config.yaml", "outputs/step_x.pt")
WITHIN = ("thesis.tex", "results.csv", "step_x.pt", ".hydra_backup/config.yaml", "result.json.old", "metrics.jsonl~")
AMONG_OURS = ("snapshots/step_x.pt", "snapshots/notes.txt", "model/notes.txt", ".hydra/mine.yaml", "todo.txt")


class Foreign:
    """Those of one trial, below `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.paths = folder, set[Path]()
        self._before: dict[Path, Look] = {}

    def plant(self, around: Path, names: tuple[str, ...], out: Path | None = None) -> None:
        """Files with these names, and with `out` a link of the user's that leads there."""
        for name in names:
            path = around / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                path.write_text(f"somebody's {name}\n")
                path.chmod(0o640)
                self.keep(path)
        if out is not None and not (around / "link").is_symlink():
            (around / "link").symlink_to(out)
            self.keep(around / "link")

    def plant_among_ours(self, run: Path) -> None:
        """In the folders that a run has left, beside its files."""
        for name in AMONG_OURS:
            if (run / name).parent.is_dir():
                self.plant(run, (name,))

    def keep(self, path: Path) -> None:
        """This one is the user's from here on."""
        os.utime(path, (1e9, 1e9), follow_symlinks=False)
        self.paths.add(path)
        self._before[path] = look(path)

    def forget(self, folder: Path) -> None:
        """Those below it were moved by their owner."""
        self.paths = {path for path in self.paths if not path.is_relative_to(folder)}

    def changed(self) -> list[str]:
        """What isn't as it was, in words."""
        told = ((path, look(path) if os.path.lexists(path) else None) for path in sorted(self.paths))
        return [
            f"the user's {path.relative_to(self.folder)} was {'changed' if now else 'removed'}"
            for path, now in told
            if now != self._before[path]
        ]


def look(path: Path) -> Look:
    """All that is to stay."""
    about = path.lstat()
    content = os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes()
    return about.st_mode, about.st_mtime_ns, content
