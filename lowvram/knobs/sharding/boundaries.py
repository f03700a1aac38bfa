"""What goes from stage to stage of a pipeline: the next stage makes room for it."""

from __future__ import annotations

from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from lowvram.config.errors import Incompatible
from lowvram.core.forms import NUM_NUMBERS, form_before, form_of, form_of_part, from_numbers, shared_forms
from lowvram.core.mesh import Ranks
from lowvram.core.rig import Part
from lowvram.core.stages import PipelineStage


@final
class Boundaries:
    """The forms of what goes from stage to stage. A stage tells its successor the first time that parts have a form.

    Args:
        ranks: of the pipeline.
        hosts: the same, for messages between their hosts; None: they can't talk to each other.
    """

    def __init__(self, ranks: Ranks, hosts: Ranks | None) -> None:
        self._ranks, self._hosts = ranks, hosts
        self._forms = shared_forms()
        self._told: set[tuple[int, tuple[object, ...]]] = set()
        self._sending: list[tuple[dist.Work | None, Tensor]] = []  # kept until they have arrived

    def rank_of(self, stage: int) -> int:
        """Which rank of the pipeline has a stage."""
        return stage % self._ranks.size

    def told(self, stage: PipelineStage, part: Part, made: Tensor) -> None:
        """What a stage has made of a part; tells the next stage's rank, if it is the first such part. Raises
        Incompatible if its form is another one than that of earlier parts like it."""
        key, form = (stage.index + 1, form_of_part(part)), form_of(made, part.num_samples)
        known = self._forms.setdefault(key, form)
        if form != known:
            raise Incompatible(
                "sharding=pipeline needs blocks that make tensors of the same shape and format of parts of the same"
                f" shape, and one has made {form} after {known}: choose sharding=fsdp"
            )
        if key in self._told:
            return
        self._told.add(key)
        if self._hosts is not None and self.rank_of(stage.index + 1) != self._ranks.rank:
            numbers = form.as_numbers()
            work = dist.isend(numbers, group=self._hosts.group, group_dst=self.rank_of(stage.index + 1))
            self._sending = [each for each in self._sending if each[0] is not None and not each[0].is_completed()]
            self._sending.append((work, numbers))

    def room(self, stage: PipelineStage, part: Part, device: torch.device) -> Tensor:
        """Memory for what the stage before makes of a part."""
        form = form_before(stage.index, part, self._forms)
        if form is None:
            assert self._hosts is not None
            numbers = torch.zeros(NUM_NUMBERS, dtype=torch.int64, device="cpu")
            dist.recv(numbers, group=self._hosts.group, group_src=self.rank_of(stage.index - 1))
            self._forms[stage.index, form_of_part(part)] = form = from_numbers(numbers)
        return torch.empty((part.num_samples * form.rows, *form.rest), dtype=form.dtype, device=device)
