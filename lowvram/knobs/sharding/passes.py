"""In which order the ranks of a pipeline compute, by the schedules of torch.distributed.pipelining."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from lowvram.config.errors import require
from lowvram.core.stages import Pass

GPIPE, ONE_AHEAD = "gpipe", "1f1b"  # of `SCHEDULES`; the others are for several stages on each rank


def check_parts(schedule: str, num_ranks: int, num_stages: int, num_parts: int) -> None:
    """Raises BadInput for a number of parts that the schedule can't have; arguments as of `passes_of`."""
    if schedule == GPIPE:
        return
    least, instead = num_ranks * num_stages, "(or choose sharding.schedule=gpipe)"
    allowed = f"at least {least}, the number of stages, with sharding.schedule={schedule} {instead}"
    require(num_parts >= least, "accum.parts", num_parts, allowed)
    num_rounds = num_parts // num_ranks
    allowed = (
        f"a multiple of {num_ranks}, the number of ranks of a pipeline, with sharding.schedule={schedule} {instead}"
    )
    require(schedule == ONE_AHEAD or num_parts % num_rounds == 0, "accum.parts", num_parts, allowed)


def passes_of(schedule: str, num_ranks: int, num_stages: int, num_parts: int) -> list[list[Pass]]:
    """What each rank computes, in order.

    Args:
        schedule: gpipe, 1f1b or interleaved.
        num_ranks: of the pipeline.
        num_stages: of each rank; its first has the rank's number, each further one `num_ranks` more.
    """
    if schedule == GPIPE:
        return [in_order(rank, num_ranks, 1, num_parts, num_parts, num_parts) for rank in range(num_ranks)]
    in_round = parts_of_a_round(num_ranks, num_parts)
    per_rank = 1 if schedule == ONE_AHEAD else 2  # forward passes ahead of the next rank's
    return [
        in_order(rank, num_ranks, num_stages, num_parts, in_round, ahead)
        for rank in range(num_ranks)
        for ahead in [(num_stages - 1) * in_round + per_rank * (num_ranks - 1 - rank)]
    ]


def parts_of_a_round(num_ranks: int, num_parts: int) -> int:
    """How many parts a rank with several stages computes in one of them before it goes on with the next."""
    return num_parts // max(1, num_parts // num_ranks)


def in_order(rank: int, num_ranks: int, num_stages: int, num_parts: int, in_round: int, num_ahead: int) -> list[Pass]:
    """A rank's passes: forward passes that fill the pipeline, then a forward and a backward pass in turn.

    Args:
        num_ahead: of the first kind.
    """
    num_passes = num_stages * num_parts  # of each direction
    num_ahead = min(num_ahead, num_passes)
    parts: Counter[tuple[int, bool]] = Counter()

    def taken(local: Callable[[int], int], number: int, is_backward: bool) -> Pass:
        stage = local(number // in_round % num_stages) * num_ranks + rank
        parts[stage, is_backward] += 1
        return Pass(stage, parts[stage, is_backward] - 1, is_backward)

    def forward(number: int) -> Pass:
        return taken(lambda local: local, number, False)

    def backward(number: int) -> Pass:
        return taken(lambda local: num_stages - 1 - local, number, True)

    order = [forward(number) for number in range(num_ahead)]
    for number in range(num_passes - num_ahead):
        order += [forward(num_ahead + number), backward(number)]
    return [*order, *(backward(number) for number in range(num_passes - num_ahead, num_passes))]
