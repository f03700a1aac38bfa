"""mode=prune: a smaller model from a trained one. Whole units leave, so that the tensors are really smaller. Nothing is
trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, final

from torch import Tensor

from lowvram.compress.importance import IMPORTANCES
from lowvram.compress.transform import trained_model, trained_of, trained_tensors, transformed
from lowvram.config.errors import require
from lowvram.config.transforms import PruneSettings
from lowvram.core.rig import Part
from lowvram.data.loader import TimedBatches
from lowvram.loops import fields
from lowvram.loops.session import Session
from lowvram.models.remade import Remade
from lowvram.models.widths import Pruned, sliced


@final
@dataclass(frozen=True)
class Prune:
    """conf/mode/prune.yaml"""

    def run(self, session: Session) -> dict[str, Any]:
        settings = session.settings.prune
        large = trained_model(session, "prune", settings.run, Remade, "transformer, resnet or hf")
        pruned = smaller(session, large, settings)
        session.begin(0, settings.batches)
        row = transformed(session, "pruning", (large, pruned.config), partial(kept_values, session, large, pruned))
        print(f"pruned by {settings.importance.name}: {large.changes(pruned.config) or 'no size has changed'}")
        for sentence in pruned.left:
            print(f"stays as it is: {sentence}")
        return fields.merged(row, {"pruning": {"left": "; ".join(pruned.left) or None}})


def smaller(session: Session, large: Remade, settings: PruneSettings) -> Pruned:
    """How the model becomes smaller. Raises BadInput if it can't, or would be as large as before."""
    pruned = large.smaller(trained_of(session), settings.ratio, settings.round_to)
    allowed = f"larger, or prune.round_to={settings.round_to} smaller: this leaves all widths of the model as they are"
    require(settings.ratio == 0 or pruned.is_smaller, "prune.ratio", settings.ratio, allowed)
    return pruned


def kept_values(session: Session, large: Remade, pruned: Pruned) -> dict[str, Tensor]:
    """The trained tensors without the least important units of each width."""
    settings, batches = session.settings.prune, session.batches(0)
    session.rig.model.eval()
    try:
        counted = counting(session, batches, settings.batches)
        scores = IMPORTANCES[settings.importance].scores(session.rig, pruned.widths, counted)
    finally:
        batches.close()
    kept = [score.topk(number).indices for score, number in zip(scores, pruned.numbers, strict=True)]
    allowed = (
        "a model in which what leaves is the same as zeros in its place: without these units it computes otherwise"
    )
    require(pruned.holds(kept), "model", type(large).__name__, allowed)
    return sliced(trained_tensors(session, large), pruned.widths, kept)


def counting(session: Session, batches: TimedBatches, num_batches: int) -> Iterator[Part]:
    """The first batches; each counts as a step once it was used."""
    for number, batch in enumerate(islice(batches, num_batches), start=1):
        yield batch
        session.events("progress", step=number, values={})
