"""hydra/sweeper=optuna: Optuna chooses the values of the points, batch by batch, from the rows of those before. Imports
no torch; imports optuna on first use.

The study is in memory. What has been run is on disk, as in any sweep: with the same `seed` the same command makes the
same choices, and the points that are finished are not run again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep

from lowvram.cli.objective import Objective
from lowvram.config.errors import BadInput, Refused, require
from lowvram.results.row import Row, Status

# How a point ended that is no failure of the program, but a point to avoid.
TO_AVOID = (Status.OOM, Status.NONFINITE, Status.TIMEOUT, Status.SKIPPED, Status.INCOMPATIBLE)
KEY = "hydra.sweeper"
SAMPLERS = {"tpe": "TPESampler", "random": "RandomSampler", "nsgaii": "NSGAIISampler"}


@final
@dataclass(frozen=True)
class StudySettings:
    """The keys of conf/hydra/sweeper/optuna.yaml."""

    n_trials: int
    n_jobs: int
    sampler: str
    seed: int | None

    def __post_init__(self) -> None:
        for name in ("n_trials", "n_jobs"):
            value = getattr(self, name)
            require(type(value) is int and value >= 1, f"{KEY}.{name}", value, "a whole number of at least 1")
        require(self.sampler in SAMPLERS, f"{KEY}.sampler", self.sampler, f"one of {', '.join(SAMPLERS)}")
        is_seed = self.seed is None or (type(self.seed) is int and 0 <= self.seed < 2**32)
        require(is_seed, f"{KEY}.seed", self.seed, "null or a whole number from 0 to 2**32 - 1")


@final
class Study:
    """The trials of one sweep.

    Raises:
        Refused: optuna isn't installed.
        BadInput: what is swept can't be chosen from.
    """

    def __init__(self, swept: Sequence[Override], objective: Objective, settings: StudySettings) -> None:
        try:
            import optuna
        except ModuleNotFoundError:
            raise Refused("hydra/sweeper=optuna: it isn't installed here: pip install 'lowvram[optuna]'") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = getattr(optuna.samplers, SAMPLERS[settings.sampler])(seed=settings.seed)
        self.objective, self._states = objective, optuna.trial.TrialState
        self._study = optuna.create_study(sampler=sampler, directions=objective.directions)
        self._space = {override.get_key_element(): distribution(override) for override in swept}
        self._ends = dict[Sequence[str], Row | None]()  # by the words of a point

    @property
    def keys(self) -> list[str]:
        return list(self._space)

    def ask(self, num: int) -> dict[int, Sequence[str]]:
        """The words of the next points, by the numbers of their trials."""
        trials = [self._study.ask(self._space) for _ in range(num)]
        return {trial.number: words_of(trial.params, self.keys) for trial in trials}

    def known(self, words: Sequence[str]) -> bool:
        """Whether a point was told already: Optuna may choose it again."""
        return tuple(words) in self._ends

    def tell(self, number: int, words: Sequence[str], row: Row | None) -> None:
        """How the point of a trial has ended; None: it has no row."""
        row = self._ends.setdefault(tuple(words), row)
        values = self.objective.values(row) if row is not None else []
        if len(values) == len(self.objective.metrics):
            self._study.tell(number, values)
            return
        is_to_avoid = row is not None and row["status"] in TO_AVOID
        self._study.tell(number, state=self._states.PRUNED if is_to_avoid else self._states.FAIL)

    def best(self) -> list[str]:
        """Lines about the best points: one for one figure; for several those that no other one beats in all."""
        texts = {
            " ".join(words_of(trial.params, self.keys)): self.objective.text(trial.values or [])
            for trial in self._study.best_trials
        }
        lines = [f"best of {len(self._ends)} points: {words} ({text})" for words, text in texts.items()]
        return lines if len(self.objective.metrics) > 1 else lines[:1]


def words_of(params: Mapping[str, Any], keys: Sequence[str]) -> Sequence[str]:
    """The words of a point. Numbers have the 4 digits that a reader can tell apart."""
    return [f"{key}={params[key]:.4g}" if isinstance(params[key], float) else f"{key}={params[key]}" for key in keys]


def distribution(override: Override) -> Any:
    """What Optuna may choose for a key: of `a,b`, `range(1,5)` or `interval(0.1,1)`, also as `tag(log,interval(…))`."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value, key = override.value(), override.get_key_element()
    typed = (override.input_line or key).partition("=")[2]
    try:
        if isinstance(value, IntervalSweep):
            assert value.start is not None
            assert value.end is not None
            kind = IntDistribution if isinstance(value.start, int) and isinstance(value.end, int) else FloatDistribution
            return kind(value.start, value.end, log="log" in value.tags)  # pyright: ignore[reportArgumentType]
        if isinstance(value, RangeSweep):
            numbers = list(value.range())
            if all(isinstance(number, int) for number in numbers):
                return IntDistribution(numbers[0], numbers[-1], log="log" in value.tags, step=int(value.step))
        return CategoricalDistribution(list(override.sweep_string_iterator()))
    except (ValueError, IndexError) as error:
        raise BadInput(key, typed, f"what Optuna can choose from: {error}") from None
