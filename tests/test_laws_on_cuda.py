"""Law 1 on a CUDA device, for every option that it has."""

from __future__ import annotations

import pytest
import torch

from lowvram.config.errors import Incompatible
from lowvram.core.assemble import assemble
from lowvram.core.knob import Exactness
from lowvram.knobs.compile import Compiled
from tests.laboratory import IS_EMULATED, KNOBS, NEUTRAL, OF_TRITON, PROBLEMS, knobs_of, missing_here, needs_gpu, train
from tests.test_laws import CHANGED, SMOOTH, Pair, comparable, error_of, gradient_error, has_what_it_needs, words

pytestmark = needs_gpu
CUDA = torch.device("cuda")
ATOMICS_BAND = 2e-6  # kernels that add in no fixed order
CHOSEN = [pair for pair in KNOBS if NEUTRAL[pair[0]] != pair[1]]


@pytest.mark.parametrize("pair", CHOSEN, ids=words)
def test_a_knob_keeps_the_numbers_or_is_refused(pair: Pair) -> None:
    knob = KNOBS[pair]
    smooth = [task for task in SMOOTH.values() if has_what_it_needs(knob, task)]
    if missing_here(pair, CUDA):
        with pytest.raises(Incompatible, match=f"{'='.join(pair)} needs that"):
            assemble(PROBLEMS["transformer"], knobs_of(**dict([pair])), CUDA)
    elif knob.exactness is Exactness.EXACT:
        errors = {problem: error_of(*pair, problem, torch.float32, CUDA) for problem in comparable(knob)}
        changed = {problem for problem in errors if knob.caveat(PROBLEMS[problem].make_model())}
        assert all(errors[problem] > CHANGED for problem in changed)
        assert all(errors[problem] <= max(knob.band, ATOMICS_BAND) for problem in errors.keys() - changed), errors
    elif IS_EMULATED and (isinstance(knob, Compiled) or not knob.needs().isdisjoint(OF_TRITON)):
        # Triton's kernels write nothing there: the values are noise, so the runs are asked only for their steps.
        assert all(len(train(task, knobs_of(**dict([pair])), [32], device=CUDA).losses) == 1 for task in smooth)
    else:
        errors = [gradient_error(pair[0], knob, task, CUDA) for task in smooth]
        assert max(errors) <= knob.band, errors
