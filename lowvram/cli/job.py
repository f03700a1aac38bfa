"""Hydra's job: one point from its composed configuration to its row on disk, in whatever process a launcher runs it.
Imports no torch.
"""

from __future__ import annotations

import shlex
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, final

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from lowvram.cli.errors import sentence, unforeseen
from lowvram.cli.here import Here
from lowvram.cli.objective import Objective
from lowvram.cli.probes import side_by_side, slots_of
from lowvram.cli.submit import Place, Submitter, check_launcher, launcher_of
from lowvram.config import identity, wandb_environment
from lowvram.config.compose import MISTAKES, check_left_to_us, chosen, container, output_folder, plain
from lowvram.config.errors import Refused
from lowvram.config.parent_settings import PARENT_SECTIONS, LoggerSettings
from lowvram.config.run_names import run_name, sweep_group
from lowvram.config.secret import text_without_secrets, words_without_secrets
from lowvram.config.settings import check_root, checked_sections, is_inline, is_plan, is_search, is_solve
from lowvram.config.transforms import is_transform
from lowvram.fidelity.client import check_fresh
from lowvram.launch.launcher import Local, Unsure, own_token
from lowvram.launch.pool import AUTO, ONE
from lowvram.launch.spec import Point
from lowvram.launch.stop import StopConditions, stop_signals
from lowvram.launch.torchrun import Launch, launch_from
from lowvram.planning.client import plan_for_row
from lowvram.planning.devices import load_device
from lowvram.results import row as rows
from lowvram.results.files.claim import Claim, Held
from lowvram.results.files.run_folder import has_snapshots
from lowvram.results.row import Row, Status
from lowvram.runs import folders
from lowvram.runs.callbacks import check_callbacks
from lowvram.runs.hydra_notes import notes_of, write_notes
from lowvram.runs.run import row_inline, run_point
from lowvram.runs.submission import Submission
from lowvram.search.client import Searches
from lowvram.search.solve import Solves, start_of

UNRECORDED = asdict(LoggerSettings())  # as logger=none
HELD_S = 300.0  # how long a job waits for its earlier life, whose node was lost, to be gone; locks of NFS end later

# A launcher's process imports this module with the job, before it composes.
identity.register_resolvers()


@dataclass(frozen=True)
class Ending:
    """What a job returns to the program. Pickled, if the launcher ran the job in another process.

    Attributes:
        row: the point's row if it isn't on disk: the run was refused, or the disk is full.
        is_kept: an earlier program has finished the point.
        is_stopped: a stop was requested before anything was known, so there is no row.
        holder: the other program that runs the point now.
        place: where the point is in a queue, if it isn't finished.
        refusal: an error in the input or of the disk that ends the whole call.
        error: the exception of a point that ran in this process (process=inline), raised again at the end.
    """

    index: int
    folder: Path
    row: Row | None = None
    is_kept: bool = False
    is_stopped: bool = False
    holder: str | None = None
    place: Place | None = None
    refusal: Refused | OSError | None = None
    error: BaseException | None = None

    def read_row(self) -> Row | None:
        """The row of the point, unless it has none or another program runs the point."""
        return (self.row or rows.read(self.folder)) if self.has_row else None

    @property
    def has_row(self) -> bool:
        """Whether the point has ended with a row, here or on disk."""
        return not (self.is_stopped or self.holder or self.place or self.refusal)


@final
class Job:
    """Runs points in this process. It raises only bugs: what the program must know of a point and the disk doesn't
    hold, it returns as an `Ending`."""

    def __init__(self, here: Here) -> None:
        self._here = here
        self._submitters: dict[int, Submitter] = {}  # by the queue's id; equal settings are one object

    def __call__(self, config: DictConfig) -> Ending:
        """Run the point that Hydra has composed, unless its folder already holds the result."""
        about = HydraConfig.get()
        is_sweep = about.mode == RunMode.MULTIRUN
        ending = Ending(about.job.num if is_sweep else 0, output_folder())
        try:
            return self._run_in_sweep(config, ending) if is_sweep else self._run_alone(config, ending)
        except MISTAKES as error:
            refusal = Refused(sentence(error))
            refusal.__cause__ = error
            return replace(ending, refusal=refusal)
        except OSError as error:
            return replace(ending, refusal=error)

    def _run_alone(self, config: DictConfig, ending: Ending) -> Ending:
        """A single run. Its folder was taken before Hydra made it, unless the user has replaced Hydra's callbacks."""
        claim = folders.run_at(ending.folder) or begin_run(config)
        point = make_point(config)
        if stop_signals():
            return replace(ending, is_stopped=True)
        if (submitter := self._submitter(config)) is not None:
            self._check(point)
            with kept_if_unsure():
                return self._submitted(ending, point, submitter)
        if (jobs := str(point.config["jobs"])) not in (AUTO, ONE) and not is_search(point.choices):
            self._here.progress.say(f"jobs={jobs}: this is one point, which runs alone; -m runs several")
        if Submission.of_this_job(point.folder) is None:
            return ended(ending, *run_in_folder(point, claim, self._row_of))
        earlier = rows.read(point.folder)
        is_same = earlier is not None and rows.is_final(earlier) and earlier["id"] == point.id
        if is_same and not claim.was_cut_off:  # another job has finished it
            return replace(ending, is_kept=True)
        find = self._row_of if point.sweep is None else lambda point: self._row_of_sweep(point, None)
        return ended(ending, *run_in_folder(point, claim, find))

    def _run_in_sweep(self, config: DictConfig, ending: Ending) -> Ending:
        """Run one point of a sweep, unless it is finished or another program runs it."""
        point = make_point(config)
        if stop_signals():
            return replace(ending, is_stopped=True)
        mistake, submitter = mistake_in(config), self._submitter(config)
        try:
            with folders.point_folder(point, lambda: self._is_queued(point, submitter)) as (claim, earlier):
                if earlier is None and submitter is not None:
                    earlier = submitter.late_row(point.folder)
                if earlier is not None and (rows.is_final(earlier) or (submitter and not rows.is_missing(earlier))):
                    return replace(ending, is_kept=True)
                if submitter is not None and mistake is None:
                    with undone_if_refused(claim):
                        return self._submitted(ending, point, submitter)
                row, error = run_in_folder(point, claim, lambda point: self._row_of_sweep(point, mistake))
                if row is None:
                    claim.undo()
        except Held as held:
            if submitter is not None and (job := submitter.held(point.folder)) is not None:
                return self._in_queue(ending, submitter.place(point.name, job))
            return replace(ending, holder=held.who)
        return ended(ending, row, error)

    def _is_queued(self, point: Point, submitter: Submitter | None) -> bool:
        """Whether the queue has a job for a point."""
        return submitter is not None and submitter.held(point.folder) is not None

    def _submitter(self, config: DictConfig) -> Submitter | None:
        """What hands points to the queue that the configuration names; None: they run here."""
        launcher = launcher_of(config)
        if isinstance(launcher, Local) or own_token():
            return None
        return self._submitters.setdefault(id(launcher), Submitter(launcher))

    def _submitted(self, ending: Ending, point: Point, submitter: Submitter) -> Ending:
        """Hand a point to a queue, unless it is there."""
        words = container(HydraConfig.get().overrides.task, resolve=False)
        return self._in_queue(ending, submitter.submit(point, words))

    def _in_queue(self, ending: Ending, place: Place) -> Ending:
        self._here.progress.say(place.line)
        return replace(ending, place=place)

    def _check(self, point: Point) -> None:
        """Build the objects of a point in a child process. Raises Refused if something is wrong with them."""
        asked = {"configs": [point.config]}
        answer = self._here.server.ask("check", asked, StopConditions(None, stop_signals))
        if answer and answer["status"] != Status.OK:
            raise Refused(answer["reason"])

    def _row_of(self, point: Point) -> Result:
        """Plan, search or run the point, as its mode asks. The row is None if a stop was requested before it."""
        here = self._here
        if is_inline(point.config):
            return row_inline(point, stop_signals)
        if is_plan(point.choices):
            return here.plans.row(point), None
        if is_search(point.choices):
            if point.launch is not None:
                raise Refused("mode=search under torchrun: search without it, on one device")
            words = container(HydraConfig.get().overrides.task, resolve=False)
            slots = slots_of(point, here)
            beside = partial(side_by_side, point, slots, here) if len(slots) > 1 else None
            return Searches(here.server, here.progress, stop_signals, here.plans.again, beside).row(point, words), None
        if is_solve(point.choices):
            if point.launch is not None:
                raise Refused("mode=solve under torchrun: solve without it")
            words = container(HydraConfig.get().overrides.task, resolve=False)
            return Solves(here.server, here.progress, stop_signals, here.plans.again).row(point, words), None
        if is_transform(point.choices):  # no step of training, of which there could be a plan
            return run_point(point, here.server, here.progress, stop_signals, here.plans.again), None
        point = here.plans.with_plan(point, plan_for_row(here.plans.of(point)))
        skipped = here.plans.skipped(point)
        return skipped or run_point(point, here.server, here.progress, stop_signals, here.plans.again), None

    def _row_of_sweep(self, point: Point, mistake: Exception | None) -> Result:
        """As `_row_of`, for a point of a sweep: the sweep goes on after a point that can't run and after a bug of ours.

        Args:
            mistake: the error that the check of the point's configuration raised.
        """
        try:
            if mistake is not None:
                raise mistake
            row, error = self._row_of(point)
            if row is not None and not asks_plans(point.choices):  # those have printed
                self._tell_point(point, row)
            return row, error
        except MISTAKES as refusal:
            if mistake is None:
                raise
            return self._left(point, Status.INCOMPATIBLE, sentence(refusal)), None
        except OSError:
            raise
        except Exception as bug:
            earlier = rows.read(point.folder)
            if earlier is not None and rows.is_final(earlier):  # keep the final row
                raise
            progress = self._here.progress
            progress.stop()
            for line in text_without_secrets(traceback.format_exc()).splitlines():
                progress.say(line)
            return self._left(point, Status.ERROR, unforeseen(bug)), None

    def _left(self, point: Point, status: Status, reason: str) -> Row:
        """Write the row of a point that hasn't run, unless the run that it would continue has left one."""
        row = rows.merge(point.first_row(), {"status": status.value, "reason": reason})
        if point.earlier is None:
            rows.write(point.folder, row)
        self._tell_point(point, row)
        return row

    def _tell_point(self, point: Point, row: Row) -> None:
        """After a point of a sweep: print its line, and save the table so far."""
        here = self._here
        here.progress.say(": ".join(filter(None, [point.name, row["status"], row["reason"]])))
        here.table.save(point.folder.parent)


def begin_run(config: DictConfig) -> Claim:
    """Check the configuration, and lock the folder of a single run."""
    check(config)
    folder = Path(HydraConfig.get().run.dir)
    wait_s = 0.0 if Submission.of_this_job(folder) is None else HELD_S
    return folders.begin_run(folder, config["resume"], wait_s)


@contextmanager
def undone_if_refused(claim: Claim) -> Iterator[None]:
    """Remove what was made for a point that the queue doesn't take."""
    try:
        yield
    except Unsure:
        raise
    except Refused:
        claim.undo()
        raise


@contextmanager
def kept_if_unsure() -> Iterator[None]:
    """Keep the folder of a single run which the queue has perhaps taken."""
    try:
        yield
    except Unsure:
        folders.end_runs(is_refused=False)
        raise


Result = tuple[Row | None, BaseException | None]  # the row of a point, and the error of one that ran in this process


def run_in_folder(point: Point, claim: Claim, find: Callable[[Point], Result]) -> Result:
    """Run a point that has no final row yet, with `find`."""
    is_resumed = has_snapshots(point.folder)
    earlier = rows.read(point.folder) if is_resumed and not claim.was_cut_off else None
    point = replace(point, locks=(claim.fd,), fence=claim.fence, run=claim.run, is_resumed=is_resumed, earlier=earlier)
    if not point.is_resumed:  # a resumed point writes them at its first step
        write_notes(point.folder, point.notes)
    return find(point)


def ended(ending: Ending, row: Row | None, error: BaseException | None) -> Ending:
    """The ending with its row, or without if the same row is on disk."""
    is_on_disk = row is not None and rows.read(ending.folder) == row
    return replace(ending, row=None if is_on_disk else row, is_stopped=row is None, error=error)


def make_point(config: DictConfig) -> Point:
    """The point that Hydra has composed."""
    about, folder, launch = HydraConfig.get(), output_folder(), launch_from()
    is_sweep, words = about.mode == RunMode.MULTIRUN, container(about.overrides.task, resolve=False)
    submission, job = Submission.read(folder), Submission.of_this_job(folder)
    values = {**plain(config), **({} if launch is None or launch.records else {"logger": UNRECORDED})}
    values |= {} if job is None else {"resume": None}  # which only says where the job is to run it
    command = shlex.join(["python", "train.py", *words_without_secrets(words)])
    earlier = rows.read(folder) or {**rows.empty_row(), "name": folder.name, **names_of(submission)}
    return Point(  # a point resumed alone keeps its names
        id=identity.point_id(_root_=config),
        name=about.sweeper.get("point") or earlier["name"],
        index=about.job.num if is_sweep else earlier["index"] or 0,
        folder=folder,
        config=values,
        choices=chosen(about.runtime.choices),
        sweep=folder.parent.name if is_sweep else job and job.sweep,
        provenance=identity.provenance(values["seed"], command),
        logged=logged(about, earlier, words, values),
        launch=launch,
        notes=notes_of(config),
    )


def names_of(submission: Submission | None) -> dict[str, Any]:
    """What the row of a point that was handed to a queue begins with."""
    return {} if submission is None else {name: getattr(submission, name) for name in ("name", "index", "logged")}


def logged(about: Any, earlier: Row, words: Sequence[str], values: Mapping[str, Any]) -> dict[str, str | None]:
    """What the point that Hydra has composed is called at its loggers. All points of a sweep have one group, those that
    a later call adds as well, unless the user gives one (logger.group, or WANDB_RUN_GROUP).

    Args:
        values: the composed configuration.
    """
    names, before, sweep = about.sweeper, earlier["logged"], output_folder().parent
    name, given = names.get("run") or before["name"], wandb_environment.name(values)
    if given and not before["name"]:
        name = "-".join(filter(None, [given, name]))
    name = name or run_name(words)
    group = values["logger"]["group"] or before["group"] or wandb_environment.group(values)
    if about.mode == RunMode.MULTIRUN:
        group = group or rows.group_in(sweep) or sweep_group(sweep, names.get("axes", ()))
    return {"name": name, "group": group}


def mistake_in(config: DictConfig) -> Exception | None:
    """The error in the configuration of a sweep's point, if there is one."""
    try:
        check(config)
    except Exception as error:
        return error
    return None


def check_values(config: DictConfig) -> None:
    """Raises BadInput for a wrong value of a point, as far as that can be told without torch."""
    check_root(config)
    checked_sections(config, PARENT_SECTIONS)
    check_callbacks(config.callbacks or ())
    check_launcher(config)
    if config.optimized_metric is not None:
        Objective.named(config.optimized_metric)
    if config.plan.device != "auto":
        load_device(config.plan.device)


def check(config: DictConfig) -> None:
    """Raises BadInput for what can be checked of a point without torch."""
    about, launch = HydraConfig.get(), launch_from()
    check_values(config)
    values, choices = plain(config), chosen(about.runtime.choices)
    check_fresh(values, launch)
    check_left_to_us(about)
    if is_solve(choices):
        start_of(values)
    if is_inline(values):
        check_alone(choices, launch)


def asks_plans(choices: Mapping[str, str]) -> bool:
    """Whether a point is planned, and runs only as the outcome of plans."""
    return is_plan(choices) or is_search(choices) or is_solve(choices)


def check_alone(choices: Mapping[str, str], launch: Launch | None) -> None:
    """Raises Refused for torchrun, mode=search and mode=solve, which need more processes than the one of
    process=inline."""
    if launch is not None:
        raise Refused("process=inline: must be child under torchrun")
    if is_search(choices) or is_solve(choices):
        raise Refused(
            f"process=inline: must be child with mode={choices['mode']}, each of whose probes needs a process"
        )
