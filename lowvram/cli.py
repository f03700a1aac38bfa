"""The command line: Hydra composes, points run, the exit code is read off their rows. Imports no torch."""

from __future__ import annotations

import contextlib
import inspect
import os
import shlex
import signal
import sys
import termios
from pathlib import Path
from typing import Any, final

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from lowvram import identity, sweeper
from lowvram.config import require
from lowvram.mistakes import MISTAKES, Refused, sentence
from lowvram.point import CHILDS_OWN, Point, remove_folder, run_point
from lowvram.process.client import Event, Server
from lowvram.results import row as rows
from lowvram.results import table
from lowvram.results.row import Row, Status
from lowvram.results.wandb import sync_command
from lowvram.results.terminal import (
    command_line,
    hydra_quoted,
    progress_for,
    restore_terminal,
    shown_path,
    summary,
)
from lowvram.resume import has_snapshots, with_resumed
from lowvram.settings import GROUPS, check_root

EXIT_REFUSED, EXIT_INTERRUPTED = 3, 75


def main() -> None:
    """`python train.py …` and `lowvram …`."""
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    program = Program(sys.argv[1:])
    with terminal_restored():
        try:
            program.run()
            code = program.close()
        except MISTAKES as error:
            if wants_traceback:
                raise
            print(sentence(error), file=sys.stderr)
            code = EXIT_REFUSED
        finally:
            program.server.stop()
    sys.exit(code)


@contextlib.contextmanager
def terminal_restored() -> Any:
    """Cursor, colours and echo as they were, however a child may have died."""
    before = termios.tcgetattr(0) if os.isatty(0) else None
    try:
        yield
    finally:
        restore_terminal(sys.stdout)
        if before is not None:
            termios.tcsetattr(0, termios.TCSADRAIN, before)


@final
class Program:
    """One call of the command line: what it has run so far, and how often it was asked to stop."""

    def __init__(self, words: list[str]) -> None:
        self.words = words
        self.server, self.progress = Server(), progress_for(sys.stdout)
        self.rows: list[Row] = []
        self.kept: set[str] = set()  # ids of points that an earlier call has finished
        self.swept: list[str] = []  # the keys that differ between the points of a sweep
        self.last: Point | None = None
        self.mistake: Exception | None = None
        self.num_signals = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._count_signal)  # only counts, so nothing is torn in the middle

    def _count_signal(self, number: int, frame: Any) -> None:
        self.num_signals += 1

    def run(self) -> None:
        """Hand the words to Hydra, which calls back with each composed point."""

        def job(config: DictConfig) -> None:  # a plain function: Hydra asks for its name and module
            try:
                self.run_one(config)
            except MISTAKES as error:  # Hydra would print more than it
                self.mistake = error

        identity.register_resolvers()
        sweeper.register(self.check_sweep)
        os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions come up to us, instead of a print and exit(1)
        sys.argv = [sys.argv[0], *with_resumed(self.words)]
        # From 1.4 on Hydra wants to be told what it may instantiate.
        trust = (
            {"execution_whitelist": ["lowvram.*"]}
            if "execution_whitelist" in inspect.signature(hydra.main).parameters
            else {}
        )
        with contextlib.suppress(KeyboardInterrupt):
            hydra.main(version_base="1.3", config_path=config_path(), config_name="config", **trust)(job)()
        if self.mistake is not None:
            raise self.mistake

    def check_sweep(self, configs: list[DictConfig], batch: sweeper.Batch) -> None:
        """Before the first point of a sweep: build the objects of all of them, in a child that does nothing else."""
        self.swept = sweeper.swept_keys(batch)
        refused: list[str] = []

        def on_event(event: Event) -> None:
            if event["event"] == "row" and event["fields"]["status"] != Status.OK:
                refused.append(event["fields"]["reason"])

        for config in configs:
            check_root(config)
        self.server.run(
            {"check": [{key: plain(config)[key] for key in CHILDS_OWN} for config in configs]}, on_event, self.order
        )
        if refused:
            raise Refused(refused[0])

    def order(self) -> bytes | None:
        """Nothing to say to a child that only checks."""
        return None

    def run_one(self, config: DictConfig) -> None:
        """One point: composed by Hydra, run by a child, its row kept. What the point does raises nothing here."""
        if self.num_signals:
            raise KeyboardInterrupt  # Hydra would swallow any other way to end a sweep
        self.last = point = self.make_point(config)
        earlier = rows.read(point.folder) if point.sweep else None
        if earlier is not None and rows.is_final(earlier):
            self.kept.add(earlier["id"])
            self.rows.append(earlier)
            return
        self.rows.append(run_point(point, self.server, self.progress, lambda: self.num_signals))
        if point.sweep:
            self.tell_point(point, self.rows[-1])
        if self.num_signals:
            raise KeyboardInterrupt

    def make_point(self, config: DictConfig) -> Point:
        """What Hydra composed, as a point. Raises BadInput for what the root doesn't know."""
        about = HydraConfig.get()
        folder, is_sweep = Path(about.runtime.output_dir), about.mode == RunMode.MULTIRUN
        words = list(about.overrides.task)
        try:
            seed, choices = check_root(config)["root"].seed, chosen(about.runtime.choices)
        except MISTAKES:
            forget(folder)
            raise
        command = shlex.join(["python", "train.py", *rows.refuse_secrets_in_words(words)])
        return Point(
            id=identity.point_id(_root_=config),
            name=identity.point_name(words, self.swept) or folder.name,
            index=about.job.num if is_sweep else 0,
            folder=folder,
            config=plain(config),
            choices=choices,
            sweep=folder.parent.name if is_sweep else None,
            provenance=identity.provenance(seed, command),
            is_resumed=has_snapshots(folder),
        )

    def tell_point(self, point: Point, row: Row) -> None:
        """After a point of a sweep: one line, and the table as far as it goes."""
        self.progress.say(": ".join(filter(None, [point.name, row["status"], row["reason"]])))
        with contextlib.suppress(OSError):  # a full disk costs the table, not the points to come
            table.save(point.folder.parent, table.collect(point.folder.parent))

    def close(self) -> int:
        """Print what was found; returns the exit code."""
        if self.last is None:
            return EXIT_INTERRUPTED if self.num_signals else 0
        if self.last.sweep:
            self.close_sweep(self.last.folder.parent)
        elif self.rows[-1]["status"] == Status.INCOMPATIBLE:
            print(self.rows[-1]["reason"], file=sys.stderr)
            forget(self.last.folder)
        else:
            print("\n".join(summary(self.rows[-1], self.last.folder)))
        return EXIT_INTERRUPTED if self.num_signals else rows.exit_code(self.rows, sweep=bool(self.last.sweep))

    def close_sweep(self, folder: Path) -> None:
        """The table, where it lies, how to upload the runs and how to go on."""
        print(table.render(self.rows, sys.stdout, kept=self.kept))
        print(f"results: {shown_path(folder)} (table.md, table.csv, rows.jsonl)")
        if any(folder.glob("*/wandb/offline-run-*")):
            print(f"to upload: {sync_command(folder)}")
        if not all(rows.is_final(row) for row in self.rows) or self.num_signals:
            words = [word for word in self.words if not word.startswith("hydra.sweep.dir=")]
            print(
                f"to run what is missing: {command_line(*words, f'hydra.sweep.dir={hydra_quoted(shown_path(folder))}')}"
            )


def chosen(choices: DictConfig) -> dict[str, str]:
    """Group -> option, as Hydra tells it."""
    for group in GROUPS:
        require(choices.get(group) is not None, group, None, f"one option of the group {group}, not a list of them")
    return {group: choices[group] for group in (*GROUPS, "logger")}


def forget(folder: Path) -> None:
    """A run that was refused leaves no folder, unless an earlier one has filled it."""
    if rows.read(folder) is None and not has_snapshots(folder):
        remove_folder(folder)


def config_path() -> str:
    """The checkout's conf/ if there is one, else the package's."""
    return str(identity.ROOT / "conf") if (identity.ROOT / "conf").is_dir() else "pkg://lowvram.conf"


def plain(config: DictConfig) -> dict[str, Any]:
    """Resolved and free of Hydra's own part, as JSON can hold it."""
    return {str(key): container(config[key]) for key in config if key != "hydra"}


def container(node: Any) -> Any:
    return OmegaConf.to_container(node, resolve=True, enum_to_str=True) if OmegaConf.is_config(node) else node
