"""mode=grow: a deeper model from a trained one, whose blocks it copies. Nothing is trained.

Gong et al., "Efficient Training of BERT by Progressively Stacking" (2019). Wu et al., "LLaMA Pro: Progressive LLaMA
with Block Expansion" (2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, final

from torch import Tensor

from lowvram.config.errors import require
from lowvram.config.settings import GrowSettings
from lowvram.loops.session import Session
from lowvram.loops.transform import trained_model, trained_tensors, transformed
from lowvram.models.builtin import OwnModel
from lowvram.models.growth import grown, sources


@final
@dataclass(frozen=True)
class Grow:
    """conf/mode/grow.yaml"""

    def run(self, session: Session) -> dict[str, Any]:
        settings = session.settings.grow
        shallow = trained_model(session, "grow", settings.run, OwnModel, "transformer or resnet")
        deep = shallow.grown(settings.factor, settings.how)
        num_copied = sum(map(len, shallow.runs_of_blocks()))
        allowed = "the folder of a model with a block that keeps the image's shape, to be copied: it has none"
        require(num_copied > 0, "grow.run", shallow.init, allowed)
        session.begin(0, 0)
        row = transformed(session, "growing", (shallow, deep), partial(values, session, shallow, settings))
        print(f"grown by {settings.how.name}: {shallow.changes(deep)}")
        return row


def values(session: Session, shallow: OwnModel, settings: GrowSettings) -> dict[str, Tensor]:
    """The tensors of the deeper model."""
    num_blocks = len(session.problem.blocks(session.rig.model))
    deeper = sources(shallow.runs_of_blocks(), num_blocks, settings.factor, settings.how)
    return grown(trained_tensors(session, shallow), deeper, shallow.last_layers)
