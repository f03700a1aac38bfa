"""What Hydra's sweepers of ours share: the program checks and launches their points. Imports no torch.

The sweepers themselves are in hydra_plugins/, as Hydra finds its plugins nowhere else.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from typing import Any, cast, final

from hydra.core.config_loader import ConfigLoader
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from lowvram.cli.call import Call
from lowvram.cli.side_by_side import SideBySide
from lowvram.cli.sweep import Names, SweepBatch


class CheckingSweeper(Sweeper, ABC):
    """A sweeper whose points the program checks and launches; none is composed twice. It writes nothing into the
    sweep's folder: the program does.

    Attributes:
        needs_rows: whether it chooses points by how others have ended.
    """

    needs_rows = False

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """For a launcher that composes each point with `ComposesOnce`."""
        self.call, self.config = cast(Call, task_function), config
        self.call.begin_sweep(config, self.needs_rows)
        self.loader = ComposesOnce(hydra_context.config_loader)
        context = HydraContext(config_loader=cast(ConfigLoader, self.loader), callbacks=hydra_context.callbacks)
        self.hydra_context = context
        about = {"hydra_context": context, "task_function": task_function, "config": config}
        self.launcher = Plugins.instance().instantiate_launcher(**about)
        self.beside = SideBySide(self.call.slots)
        self.beside.setup(**about)

    def launch(self, coming: SweepBatch) -> None:
        """Hand points to the program, which checks and launches them."""
        assert self.launcher is not None
        assert self.config is not None
        self.loader.name(coming)
        self.call.launch(self.launcher, coming, self.config, self.beside)


@final
class ComposesOnce:
    """Hydra's loader; but what `look` has composed is not composed again when its turn comes."""

    def __init__(self, loader: ConfigLoader, names: Mapping[tuple[str, ...], Names] | None = None) -> None:
        self._loader, self._names = loader, names or {}  # of points, by their words
        self._looked_at: dict[tuple[str, ...], DictConfig] = {}

    def name(self, coming: SweepBatch) -> None:
        """Name the points of a batch; needs the whole batch, as names show what differs."""
        self._names = {tuple(words): coming.names(words) for words in coming.batch}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return ComposesOnce, (self._loader, self._names)  # a launcher may hand it to other processes

    def look(self, config: DictConfig, words: Sequence[str]) -> DictConfig:
        """A point before its turn, or words that are no point, without a name."""
        key = tuple(words)
        if key not in self._names:
            return self._composed(config, list(words))
        if key not in self._looked_at:
            self._looked_at[key] = self._composed(config, list(words))
        return self._looked_at[key]

    def load_sweep_config(self, config: DictConfig, words: list[str]) -> DictConfig:
        """A point whose turn it is."""
        return self._looked_at.pop(tuple(words), None) or self._composed(config, words)

    def _composed(self, config: DictConfig, words: list[str]) -> DictConfig:
        composed = self._loader.load_sweep_config(config, words)
        with open_dict(composed.hydra.sweeper):
            if names := self._names.get(tuple(words)):
                composed.hydra.sweeper.update(names._asdict())
        return composed
