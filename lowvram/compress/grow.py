"""mode=grow: a deeper model from a trained one, whose blocks it copies. Nothing is trained.

Gong et al., "Efficient Training of BERT by Progressively Stacking" (2019). Wu et al., "LLaMA Pro: Progressive LLaMA
with Block Expansion" (2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from lowvram.compress.transform import trained_model, trained_of, trained_tensors, transformed
from lowvram.loops import fields
from lowvram.loops.session import Session
from lowvram.models.growth import values_of
from lowvram.models.remade import Remade


@final
@dataclass(frozen=True)
class Grow:
    """conf/mode/grow.yaml"""

    def run(self, session: Session) -> dict[str, Any]:
        settings = session.settings.grow
        shallow = trained_model(session, "grow", settings.run, Remade, "transformer, resnet or hf")
        grown = shallow.deeper(trained_of(session), settings.factor, settings.how)
        session.begin(0, 0)
        models = (shallow, grown.config)
        row = transformed(
            session, "growing", models, lambda: values_of(grown.tensors, trained_tensors(session, shallow))
        )
        print(f"grown by {settings.how.name}: {shallow.changes(grown.config)}")
        for sentence in grown.left:
            print(f"stays as it is: {sentence}")
        return fields.merged(row, {"growing": {"left": "; ".join(grown.left) or None}})
