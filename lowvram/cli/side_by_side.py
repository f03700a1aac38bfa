"""jobs=N: points of a sweep side by side, each process of N with a device of its own. Imports no torch.

A launcher, as Hydra calls what runs a sweep's points.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, final

from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from lowvram.launch.pool import DIED, Pool, Slots

Words = Sequence[str]


@final
class SideBySide(Launcher):
    """Runs points in processes of its own.

    Args:
        find_slots: finds the devices; called when the first points are launched.
    """

    def __init__(self, find_slots: Callable[[], Slots]) -> None:
        self._find_slots = find_slots

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._job = (hydra_context, task_function, config)

    def launch(self, job_overrides: Sequence[Words], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the points; returns how each has ended, in their order.

        Raises:
            RuntimeError: a process died.
        """
        setup_globals()
        points = Points(Singleton.get_state()["instances"], *self._job)  # Hydra's resolvers can't be sent
        left = enumerate(job_overrides, initial_job_idx)
        ended, died = dict[int, JobReturn](), list[int]()
        with Pool(self._find_slots()[: len(job_overrides)], points) as pool:
            while True:
                for index, words in islice(left, pool.num_idle):
                    pool.give((index, list(words)))
                if not pool.num_running:
                    break
                for (index, _), returned in pool.ended():
                    if returned is DIED:
                        died.append(index)
                    else:
                        ended[index] = JobReturn(status=JobStatus.COMPLETED, _return_value=returned)
        if died:
            raise RuntimeError(f"the process of {', '.join(f'point {index}' for index in died)} was killed")
        return [ended[index] for index in sorted(ended)]


@final
@dataclass(frozen=True)
class Points:
    """Runs points of a sweep, in a process of the pool.

    Attributes:
        singletons: of Hydra, which its composing needs.
    """

    singletons: Any
    context: HydraContext
    task: TaskFunction
    config: DictConfig

    def __call__(self, given: tuple[int, Words], held: Sequence[int]) -> Any:
        """Run the point with this index and these words; returns what the task returns."""
        setup_globals()
        Singleton.set_state({**Singleton.get_state(), "instances": self.singletons})
        index, words = given
        composed = self.context.config_loader.load_sweep_config(self.config, list(words))
        with open_dict(composed):
            composed.hydra.job.id = composed.hydra.job.num = index
        HydraConfig.instance().set_config(composed)
        about = {"hydra_context": self.context, "task_function": self.task, "config": composed}
        done = run_job(**about, job_dir_key="hydra.sweep.dir", job_subdir_key="hydra.sweep.subdir")
        return done.return_value
