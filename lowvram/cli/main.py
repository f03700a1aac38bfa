"""The command line: Hydra composes, points run, the exit code is read off their rows. Imports no torch."""

from __future__ import annotations

import errno
import inspect
import logging
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from lowvram.cli import hydra_hooks
from lowvram.cli.errors import sentence, sorted_words, unforeseen
from lowvram.cli.resume import moved, with_resumed
from lowvram.cli.sweep import Coming
from lowvram.config import identity
from lowvram.config.compose import MISTAKES, chosen, config_path, container, output_folder, plain
from lowvram.config.errors import Refused
from lowvram.config.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_REFUSED
from lowvram.config.secret import text_without_secrets, words_without_secrets
from lowvram.config.settings import check_own, check_root, is_inline, is_plan, is_search
from lowvram.fidelity.client import check_fresh
from lowvram.launch.client import Event, Server
from lowvram.launch.point import Point
from lowvram.launch.stop import Orders
from lowvram.launch.torchrun import Launch, aside, launch_from
from lowvram.planning.client import Plans, beside, request_of
from lowvram.results import row as rows
from lowvram.results import table
from lowvram.results.files.run_folder import Held, has_snapshots
from lowvram.results.live_table import LiveTable
from lowvram.results.report import report
from lowvram.results.row import Row, Status
from lowvram.results.terminal import (
    command_line,
    hydra_quoted,
    progress_for,
    shown_path,
    summary,
    tell,
    terminal_restored,
)
from lowvram.results.wandb import sweep as wandb_sweep
from lowvram.results.wandb.run import sync_command
from lowvram.runs import in_process as inline
from lowvram.runs.folders import Folders
from lowvram.runs.hydra_notes import check_left_to_us, notes_of, write_notes
from lowvram.runs.run import run_point
from lowvram.search.client import Searches

LINGER_S = 10.0
UNRECORDED = {"name": "none", "entity": None, "project": None}  # as logger=none
DISK_TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def main() -> None:
    """`python train.py …` and `lowvram …`."""
    logging.raiseExceptions = False  # W&B logs to files of its own: if the disk is full, the row says so
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    launch = launch_from()
    with terminal_restored(), aside(launch) as folder:
        program = Program(sys.argv[1:], launch, folder)
        code = run_program(program, wants_traceback)
        if code and folder is not None:
            program.linger()
    if program.error is not None:
        raise program.error  # for the eyes, or the debugger, that process=inline was typed for
    sys.exit(code)


def run_program(program: Program, wants_traceback: bool) -> int:
    """From the words to the exit code."""
    try:
        program.run()
        code = program.close()
        sys.stdout.flush()
        return code
    except MISTAKES as error:
        program.give_up()
        if wants_traceback:
            raise
        tell(sentence(error), sys.stderr)
        return EXIT_REFUSED
    except OSError as error:  # of the results: no room, no permission, no such place
        tell(f"{error.filename or 'the results'}: can't be written ({error.strerror})", sys.stderr)
        return EXIT_FAILED if error.errno in DISK_TROUBLE else EXIT_REFUSED
    finally:
        program.server.stop()
        program.folders.release()


@final
class Program:
    """One call of the command line: what it has run so far, and how often it was asked to stop."""

    def __init__(self, words: list[str], launch: Launch | None, aside: Path | None) -> None:
        self.words, self.launch = words, launch
        self.aside = aside  # the folder of a program whose results another one leaves
        self.server, self.progress = Server(), progress_for(sys.stdout)
        self.rows: list[Row] = []
        self.kept: set[str] = set()  # ids of points that an earlier call has finished
        self.coming: Coming | None = None  # points of a sweep
        self.last: Point | None = None
        self.mistake: Exception | None = None
        self.error: BaseException | None = None  # of a point that ran in this process
        self.folders, self.table = Folders(), LiveTable()
        self.num_signals = 0
        self.plans = Plans(self.server, self.progress, self.stop_signals)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._count_signal)  # only counts, so nothing is torn in the middle

    def _count_signal(self, number: int, frame: Any) -> None:
        self.num_signals += 1

    def run(self) -> None:
        """Hand the words to Hydra, which calls back with each composed point."""

        def job(config: DictConfig) -> None:  # a plain function: Hydra asks for its name and module
            with self.mistakes_end_it():
                self.run_one(config)

        identity.register_resolvers()
        hydra_hooks.register(self)
        os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions come up to us, instead of a print and exit(1)
        words = with_resumed(self.words)
        if self.aside is not None:
            words = moved(words, self.aside)
        typed, sys.argv = sys.argv, [sys.argv[0], *sorted_words(words)]
        # From 1.4 on Hydra wants to be told what it may instantiate.
        trust = (
            {"execution_whitelist": ["lowvram.*"]}
            if "execution_whitelist" in inspect.signature(hydra.main).parameters
            else {}
        )
        try:
            hydra.main(version_base="1.3", config_path=config_path(), config_name="config", **trust)(job)()
        except KeyboardInterrupt:  # ours: see `job` and `run_one`
            pass
        finally:
            sys.argv = typed  # what is printed as a command starts with it
        if self.mistake is not None:
            raise self.mistake

    @contextmanager
    def mistakes_end_it(self) -> Iterator[None]:
        """Hydra would print more than a mistake, or only warn of it; and it ends a sweep in no other way."""
        try:
            yield
        except (*MISTAKES, OSError) as error:
            self.mistake = error
            raise KeyboardInterrupt from None

    def begin_run(self, config: DictConfig) -> None:
        """Before Hydra makes the folder of a single run: check what can be checked by now, and take the folder."""
        with self.mistakes_end_it():
            HydraConfig.instance().set_config(config)  # as Hydra does for the job: a folder's name may ask for it
            self.check(config)
            self.folders.begin_run(Path(config.hydra.run.dir), config.resume)

    def begin_sweep(self, config: DictConfig) -> None:
        """Before a sweep's points are composed: take its folder."""
        with self.mistakes_end_it():
            if self.launch is not None:
                hint = "start a sweep without it, and sharding.ranks=2 (or more) for each point"
                raise Refused(f"-m under torchrun: {hint}")
            check_left_to_us(config.hydra)
            hydra_hooks.check_plugins(config.hydra)
            self.folders.begin_sweep(config)

    def begin_batch(self, coming: Coming) -> None:
        """Before the first point of a sweep: build the objects of those that stand for all, in a child of their own."""
        self.coming = self.plans.coming = coming
        refused: list[str] = []

        def on_event(event: Event) -> None:
            if event["event"] == "row" and event["fields"]["status"] != Status.OK:
                refused.append(event["fields"]["reason"])

        self.server.start()  # it imports while Hydra composes
        configs = coming.to_check()
        for config in configs:
            check_root(config)
            check_own(config)
        inline.check_sweep(configs)
        check = {"check": [request_of(config)["config"] for config in configs]}
        self.server.run(check, on_event, Orders(None, self.stop_signals))
        if self.num_signals:
            raise KeyboardInterrupt
        if refused:
            raise Refused(refused[0])
        self.folders.check_points(configs)
        self.folders.note_sweep(configs[0])

    def stop_signals(self) -> int:
        """How often somebody asked to stop so far."""
        return self.num_signals

    def run_one(self, config: DictConfig) -> None:
        """One point: composed by Hydra, run by a child, its row kept. What the point does raises nothing here."""
        self.last = point = self.make_point(config)
        if self.num_signals:
            self.forget(point)
            raise KeyboardInterrupt
        mistake: Exception | None = None
        try:
            self.check(config)
        except Exception as error:
            if not point.sweep:
                raise
            mistake = error  # the sweep goes on without it
        with suppress(Held) if point.sweep else nullcontext():  # another program runs it: others may be free
            self.run_in_its_folder(point, mistake)
        if self.num_signals:
            raise KeyboardInterrupt

    def run_in_its_folder(self, point: Point, mistake: Exception | None) -> None:
        """Run a point whose results nobody has yet.

        Args:
            mistake: for which it can't run.

        Raises:
            Held: another program runs it now.
        """
        earlier = self.folders.begin_point(point) if point.sweep else self.folders.keep_run(point)
        try:
            if earlier is not None and rows.is_final(earlier):
                self.kept.add(earlier["id"])
                self.rows.append(earlier)
                return
            held = {"locks": self.folders.locks, "run": self.folders.run}
            point = replace(point, **held, is_resumed=has_snapshots(point.folder))
            if not point.is_resumed:  # else once it is known that it goes on
                write_notes(point.folder, point.notes)
            row = self.row_of_sweep(point, mistake) if point.sweep else self.row_of(point)
            if row is None:
                self.forget(point)
            else:
                self.rows.append(row)
        finally:
            self.folders.end_point()

    def row_of(self, point: Point) -> Row | None:
        """Whatever its mode asks for. None: somebody asked to stop before anything was known."""
        if is_inline(point.config):
            return self.row_inline(point)
        if is_plan(point.choices):
            return self.plans.row(point)
        if is_search(point.choices):
            if self.launch is not None:
                raise Refused("mode=search under torchrun: search without it, on one device")
            words = container(HydraConfig.get().overrides.task, resolve=False)
            return Searches(self.server, self.progress, self.stop_signals, self.plans.again).row(point, words)
        return self.run_point(point)

    def row_of_sweep(self, point: Point, mistake: Exception | None) -> Row | None:
        """The same of a point of a sweep, which goes on after one that can't run, and after a bug of ours.

        Args:
            mistake: what has been raised of the point already.
        """
        try:
            if mistake is not None:
                raise mistake
            return self.row_of(point)
        except MISTAKES as error:
            if mistake is None:
                raise
            return self.leave_row(point, Status.INCOMPATIBLE, sentence(error))
        except OSError:
            raise
        except Exception as error:
            left = rows.read(point.folder)
            if left is not None and rows.is_final(left):  # the point's result is no worse for it
                raise
            self.progress.stop()
            for line in text_without_secrets(traceback.format_exc()).splitlines():
                self.progress.say(line)
            return self.leave_row(point, Status.ERROR, unforeseen(error))

    def leave_row(self, point: Point, status: Status, reason: str) -> Row:
        """Of a point that hasn't run; the words of those before it could all be had."""
        row = rows.merge(point.first_row(), {"status": status.value, "reason": reason})
        rows.write(point.folder, row)
        self.tell_point(point, row)
        return row

    def row_inline(self, point: Point) -> Row | None:
        """In this process."""
        row, self.error = inline.row_inline(point, self.stop_signals)
        if row is not None and point.sweep:
            self.tell_point(point, row)
        return row

    def run_point(self, point: Point) -> Row:
        """Run one beside its plan, and tell it."""
        point = replace(point, plan=beside(self.plans.of(point)))
        about = (self.server, self.progress, self.stop_signals, self.plans.again)
        row = self.plans.skipped(point) or run_point(point, *about)
        if point.sweep:
            self.tell_point(point, row)
        return row

    def make_point(self, config: DictConfig) -> Point:
        """What Hydra composed, as a point."""
        about, folder = HydraConfig.get(), output_folder()
        is_sweep, words = about.mode == RunMode.MULTIRUN, container(about.overrides.task, resolve=False)
        values = {**plain(config), **({"logger": UNRECORDED} if self.aside else {})}
        command = shlex.join(["python", "train.py", *words_without_secrets(words)])
        earlier = rows.read(folder) or {"name": folder.name, "index": 0}  # of a sweep's point that is resumed alone
        index = about.job.num if is_sweep else earlier["index"] or 0
        return Point(
            id=identity.point_id(_root_=config),
            name=self.coming.name(index) if self.coming else earlier["name"],
            index=index,
            folder=folder,
            config=values,
            choices=chosen(about.runtime.choices),
            sweep=folder.parent.name if is_sweep else None,
            provenance=identity.provenance(values["seed"], command),
            launch=self.launch,
            notes=notes_of(config),
        )

    def check(self, config: DictConfig) -> None:
        """Raises BadInput for what can be told without building anything."""
        about = HydraConfig.get()
        check_root(config)
        check_own(config)
        values, choices = plain(config), chosen(about.runtime.choices)
        check_fresh(values, self.launch)
        check_left_to_us(about)
        if is_inline(values):
            inline.check_alone(choices, self.launch)

    def tell_point(self, point: Point, row: Row) -> None:
        """After a point of a sweep: one line, and the table as far as it goes."""
        self.progress.say(": ".join(filter(None, [point.name, row["status"], row["reason"]])))
        self.table.save(point.folder.parent)

    def close(self) -> int:
        """Print what was found; returns the exit code."""
        for line in (others := self.folders.running()):
            tell(line)
        if self.last is None or not self.rows:
            self.folders.undo()
            return EXIT_INTERRUPTED if self.num_signals or others else 0
        if self.last.sweep:
            self.close_sweep(self.last.folder.parent, self.last.config["logger"])
        elif self.rows[-1]["status"] == Status.INCOMPATIBLE:
            tell(self.rows[-1]["reason"], sys.stderr)
            self.folders.undo()
        else:
            ranks = [f"sharding.ranks={self.launch.num_ranks}"] if self.launch else []  # torchrun isn't part of it
            print("\n".join(summary(self.rows[-1], self.last.folder, ranks)))
            self.tell_failure(self.rows[-1])
        if self.num_signals or others:
            return EXIT_INTERRUPTED
        return rows.exit_code(self.rows, sweep=bool(self.last.sweep))

    def give_up(self) -> None:
        """After a mistake: what was found by then is kept."""
        if self.rows and self.last is not None and self.last.sweep:
            self.close_sweep(self.last.folder.parent, self.last.config["logger"])
        else:
            self.folders.undo()

    def tell_failure(self, row: Row) -> None:
        """Under torchrun, of a rank that can't tell the one that records."""
        if self.aside and self.launch and Status(row["status"]).exit_single == EXIT_FAILED:
            tell(f"rank {self.launch.rank}: {row['status']}: {row['reason']}", sys.__stderr__)

    def linger(self) -> None:
        """torchrun ends all programs when one has failed: let that one be first that tells what it was."""
        deadline = time.monotonic() + LINGER_S
        while not self.num_signals and time.monotonic() < deadline:
            time.sleep(0.05)

    def forget(self, point: Point) -> None:
        """Of one that was stopped before anything was known of it nothing is left."""
        if point.sweep:
            self.folders.forget_point(point.folder)
        else:
            self.folders.undo()

    def close_sweep(self, folder: Path, logger: Mapping[str, Any]) -> None:
        """The table and the report, where they lie, how to upload the runs and how to go on."""
        table.save(folder, table.collect(folder))
        print(table.render(self.rows, sys.stdout, kept=self.kept))
        report.save(folder)
        tell(f"results: {shown_path(folder)} (report.html, table.md, table.csv, rows.jsonl)")
        for line in [] if self.num_signals else wandb_sweep.record(folder, logger):
            tell(line)
        if any(folder.glob("*/wandb/offline-run-*")):
            tell(f"to upload: {sync_command(folder)}")
        if any(rows.is_missing(row) for row in self.rows) or self.num_signals:
            words = [word for word in self.words if not word.startswith("hydra.sweep.dir=")]
            tell(
                f"to run what is missing: {command_line(*words, f'hydra.sweep.dir={hydra_quoted(shown_path(folder))}')}"
            )
