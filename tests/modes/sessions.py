"""What a session needs, without a process around it: samples that were drawn once, and a parent that listens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lowvram.data.source import Samples
from lowvram.data.spec import DataSpec
from tests.laboratory import make_batch


class Drawn(Samples):
    """Random samples, some of whose targets don't count."""

    def __init__(self, spec: DataSpec, num_samples: int) -> None:
        self.batch = make_batch(spec, num_samples)

    def __len__(self) -> int:
        return self.batch.num_samples

    def sample(self, index: int, epoch: int) -> tuple[Tensor, Tensor]:
        return self.batch.inputs[index], self.batch.targets[index]


@dataclass
class Told:
    """What a mode tells its parent, and a parent that may ask it to stop."""

    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    stop_at: int | None = None  # the step after which to stop
    requested: bool = False

    def __call__(self, event: str, **fields: Any) -> None:
        self.events.append((event, fields))
        self.requested = self.requested or (event == "metrics" and fields["step"] == self.stop_at)

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        yield

    def values(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of every metric of this name."""
        metrics = [fields for event, fields in self.events if event in ("metrics", "record")]
        return [(fields["step"], fields["values"][name]) for fields in metrics if name in fields["values"]]
