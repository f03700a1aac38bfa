"""mode=prune: a smaller model from a trained one. Whole units leave, so that the tensors are really smaller. Nothing is
trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, final

from torch import Tensor

from lowvram.config.errors import require
from lowvram.config.settings import PruneSettings
from lowvram.core.rig import Part
from lowvram.data.loader import TimedBatches
from lowvram.loops.importance import IMPORTANCES
from lowvram.loops.session import Session
from lowvram.loops.transform import changes, trained_model, trained_tensors, transformed
from lowvram.models.builtin import OwnModel
from lowvram.models.widths import sliced


@final
@dataclass(frozen=True)
class Prune:
    """conf/mode/prune.yaml"""

    def run(self, session: Session) -> dict[str, Any]:
        settings = session.settings.prune
        large = trained_model(session, "prune", settings.run)
        small = smaller(large, settings)
        session.begin(0, settings.batches)
        pruned = transformed(session, "pruning", (large, small), partial(kept_values, session, large, small))
        print(f"pruned by {settings.importance.name}: {changes(large, small)}")
        return pruned


def smaller(large: OwnModel, settings: PruneSettings) -> OwnModel:
    """The configuration of the pruned model. Raises BadInput if it would be as large as before."""
    small = large.pruned(settings.ratio, settings.round_to)
    sizes = zip(large.inner_widths(), small.inner_widths(), strict=True)
    is_smaller = settings.ratio == 0 or any(after.num_units < before.num_units for before, after in sizes)
    allowed = f"larger, or prune.round_to={settings.round_to} smaller: this leaves all widths of the model as they are"
    require(is_smaller, "prune.ratio", settings.ratio, allowed)
    return small


def kept_values(session: Session, large: OwnModel, small: OwnModel) -> dict[str, Tensor]:
    """The trained tensors without the least important units of each width."""
    settings, batches, widths = session.settings.prune, session.batches(0), large.inner_widths()
    session.rig.model.eval()
    try:
        counted = counting(session, batches, settings.batches)
        scores = IMPORTANCES[settings.importance].scores(session.rig, widths, counted)
    finally:
        batches.close()
    numbers = (width.num_units for width in small.inner_widths())
    kept = [score.topk(number).indices for score, number in zip(scores, numbers, strict=True)]
    return sliced(trained_tensors(session, large), widths, kept)


def counting(session: Session, batches: TimedBatches, num_batches: int) -> Iterator[Part]:
    """The first batches; each counts as a step once it was used."""
    for number, batch in enumerate(islice(batches, num_batches), start=1):
        yield batch
        session.events("progress", step=number, values={})
