"""hydra/sweeper=optuna. Hydra finds it here; how Optuna chooses points is in lowvram/cli/optuna_study.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast, final

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from lowvram.cli.objective import Objective
from lowvram.cli.optuna_study import Study, StudySettings
from lowvram.cli.sweep import NUM_CHECKED, Compose, SweepBatch
from lowvram.cli.sweeper import CheckingSweeper
from lowvram.config.errors import Refused, require
from lowvram.config.settings import is_inline
from lowvram.results.terminal import tell


@final
class OptunaSweeper(CheckingSweeper):
    """conf/hydra/sweeper/optuna.yaml: asks Optuna for points, runs them, and tells it their figures."""

    needs_rows = True

    def __init__(
        self,
        n_trials: int,
        n_jobs: int,
        sampler: str,
        seed: int | None,
        params: Any = None,
        points: Any = None,
    ) -> None:
        require(
            points is None, "hydra.sweeper.points", points, "null: with hydra/sweeper=optuna Optuna makes the points"
        )
        self.settings, self.params = StudySettings(n_trials, n_jobs, sampler, seed), params or {}

    def sweep(self, arguments: list[str]) -> None:
        """Run `n_trials` points, `n_jobs` at a time."""
        assert self.config is not None
        compose = partial(self.loader.look, self.config)
        parser = OverridesParser.create(config_loader=cast(ConfigLoader, self.loader))
        configured = [f"{key}={value}" for key, value in self.params.items()]
        typed = {each.get_key_element(): each for each in parser.parse_overrides([*configured, *arguments])}
        swept = [override for override in typed.values() if override.is_sweep_override()]
        fixed = [word(override) for override in typed.values() if not override.is_sweep_override()]
        if not swept:
            raise Refused("hydra/sweeper=optuna: must be typed with keys to choose values of, such as accum=x2,x4")
        config = compose(fixed)
        if is_inline(cast(Any, config)):
            raise Refused("process=inline: must be child with hydra/sweeper=optuna: each point needs a process")
        study = Study(swept, Objective.named(config.optimized_metric), self.settings)
        check_options(compose, fixed, swept)
        self._run(study, fixed, compose)
        for line in study.best():
            tell(line)

    def _run(self, study: Study, fixed: Sequence[str], compose: Compose) -> None:
        num_asked, num_launched = 0, 0
        while num_asked < self.settings.n_trials and not self.call.is_over():
            asked = study.ask(min(self.settings.n_jobs, self.settings.n_trials - num_asked))
            num_asked += len(asked)
            fresh = list(dict.fromkeys(tuple(words) for words in asked.values() if not study.known(words)))
            batch = [[*fixed, *words] for words in fresh]
            if batch:
                self.launch(SweepBatch(batch, num_launched, compose, study.keys, [] if num_launched else [fixed]))
            rows = {words: self.call.row(num_launched + place) for place, words in enumerate(fresh)}
            num_launched += len(fresh)
            if not self.call.is_over():
                for number, words in asked.items():
                    study.tell(number, words, rows.get(tuple(words)))


def word(override: Override) -> str:
    return f"{override.get_key_element()}={override.get_value_element_as_str()}"


def check_options(compose: Compose, fixed: Sequence[str], swept: Sequence[Override]) -> None:
    """Raises Hydra's error for a value that can't be composed, of up to `NUM_CHECKED` in the lists that are swept."""
    listed = [override for override in swept if override.is_choice_sweep()]
    words = [f"{each.get_key_element()}={value}" for each in listed for value in each.sweep_string_iterator()]
    for one in words[:NUM_CHECKED]:
        compose([*fixed, one])
