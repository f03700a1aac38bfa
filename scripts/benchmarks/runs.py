"""Points run from Python: the same configuration, processes and rows as the command line's. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, final

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from lowvram.config import identity
from lowvram.config.compose import chosen, plain
from lowvram.config.defaults import CONF
from lowvram.config.errors import require
from lowvram.config.parent_settings import PARENT_SECTIONS
from lowvram.config.secret import words_without_secrets
from lowvram.config.settings import check_root, checked_sections, is_inline, is_plan, is_search
from lowvram.launch.client import Server
from lowvram.launch.spec import Point
from lowvram.planning.client import Plans, plan_for_row, request_for
from lowvram.results.row import Row
from lowvram.results.terminal import QuietProgress
from lowvram.runs.run import run_point
from lowvram.search.client import Searches


@final
class Runs:
    """Runs points one after another, each in a fresh child, below one folder.

    with Runs(Path("outputs/mine")) as runs:
        row = runs.run("a name", ["mode=measure", "precision=bf16"])
    """

    def __init__(self, folder: Path, conf: Path = CONF) -> None:
        self.folder, self.conf = folder, conf
        self._server, self._num_points = Server(), 0

    def __enter__(self) -> Runs:
        identity.register_resolvers()
        GlobalHydra.instance().clear()
        initialize_config_dir(str(self.conf), version_base="1.3")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        GlobalHydra.instance().clear()
        self._server.stop()

    def run(self, name: str, words: list[str]) -> Row:
        """The row of the configuration that `words` (as on the command line, logger=none) compose.

        Raises:
            BadInput: a key or a value of the root that is not known.
        """
        point, plans = self._point(name, words), self._plans()
        if is_plan(point.choices):
            (row,) = self._planned([point])
            return row
        if is_search(point.choices):
            point.folder.mkdir(parents=True)
            row = Searches(self._server, plans.progress, lambda: 0, plans.again).row(point, [*words, "logger=none"])
            assert row is not None
            return row
        point = plans.with_plan(point, plan_for_row(plans.of(point)))
        point.folder.mkdir(parents=True)
        return run_point(point, self._server, plans.progress, lambda: 0, plans.again)

    def plan(self, points: Mapping[str, list[str]]) -> list[Row]:
        """The rows of what points would hold, by name: all planned in one process, and none of them runs.

        Raises:
            BadInput: as `run`.
        """
        return self._planned([self._point(name, ["mode=plan", *words]) for name, words in points.items()])

    def settings_of(self, words: list[str]) -> dict[str, Any]:
        """The configuration that `words` compose, as `lowvram.config.settings.settings` takes it."""
        return plain(compose("config", [*words, "logger=none"], return_hydra_config=True))

    def _plans(self) -> Plans:
        return Plans(self._server, QuietProgress(sys.stderr), lambda: 0)

    def _planned(self, points: list[Point]) -> list[Row]:
        plans = self._plans()
        plans.ask({point.index: request_for(point.config, point.choices) for point in points})
        for point in points:
            point.folder.mkdir(parents=True)
        return [row for point in points if (row := plans.row(point)) is not None]

    def _point(self, name: str, words: list[str]) -> Point:
        config = compose("config", [*words, "logger=none"], return_hydra_config=True)
        values, seed = plain(config), check_root(config)["root"].seed
        require(not is_inline(values), "process", values["process"], "child: these runs are for figures")
        checked_sections(config, PARENT_SECTIONS)
        index = self._num_points
        self._num_points += 1
        return Point(
            id=f"{index:04d}",
            name=name,
            index=index,
            folder=self.folder / f"{index:04d}",
            config=values,
            choices=chosen(config.hydra.runtime.choices),
            sweep=self.folder.name,
            provenance=identity.provenance(seed, f"python train.py {' '.join(words_without_secrets(words))}"),
        )
