"""Several pipelines: what their copies of a stage hold."""

from __future__ import annotations

import pytest

from lowvram.config.errors import BadInput
from lowvram.core.kind import Kind
from lowvram.core.row_shape import RowShape
from lowvram.knobs.accum import Parts
from lowvram.knobs.sharding import PipelineParallel
from lowvram.planning.target import Target
from lowvram.planning.trace.tracer import trace
from tests.knobs.test_sharding_pipeline import DEEP, Choices, measured_peaks
from tests.laboratory import knobs_of
from tests.ranks import on_ranks

pytestmark = pytest.mark.medium


def test_one_pipeline_has_no_copies_to_share() -> None:
    with pytest.raises(BadInput, match=r"sharding\.copies='nope': must be one of ddp, zero1, fsdp"):
        PipelineParallel(copies="nope")
    with pytest.raises(BadInput, match=r"sharding\.copies='zero1': must be ddp where all 4 ranks are one pipeline"):
        PipelineParallel(copies="zero1").row_shape(4)
    assert PipelineParallel(pipeline=2, copies="zero1").row_shape(4) == RowShape(pipeline=2)


@pytest.mark.slow
@pytest.mark.parametrize("copies", ["ddp", "zero1", "fsdp"])
def test_pipelines_that_share_copies_take_what_is_planned(copies: str) -> None:
    choices: Choices = {
        "optimizer": "adamw",
        "accum": Parts(4),
        "sharding": PipelineParallel(pipeline=2, copies=copies),
    }
    target, found = Target(None, 4, RowShape(pipeline=2)), on_ranks(measured_peaks, choices, 16, num_ranks=4)
    num_tensors = len([*DEEP.make_model().parameters()]) // 2
    for stage, real in zip(target.stages(), found[::2], strict=True):  # the first rank of each
        paper = trace(DEEP, knobs_of(**choices), 32, stage).sums(is_steady=True)
        assert paper.peak_bytes == pytest.approx(real.peak_bytes, rel=0.01)
        for kind in (Kind.PARAMETERS, Kind.GRADIENTS, Kind.OPTIMIZER, Kind.ACTIVATIONS):
            assert paper.by_kind_max[kind] == pytest.approx(real.by_kind_max[kind], rel=0.01, abs=1024), kind
        if copies != "ddp":
            whole = trace(DEEP, knobs_of(**choices | {"sharding": PipelineParallel(pipeline=2)}), 32, stage)
            states = whole.sums(is_steady=True).by_kind_max[Kind.OPTIMIZER]
            assert real.by_kind_max[Kind.OPTIMIZER] <= 0.52 * states + 2 * 512 * num_tensors  # rounded up
