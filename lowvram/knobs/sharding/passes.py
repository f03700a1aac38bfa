"""In which order the ranks of a pipeline compute, by the schedules of torch.distributed.pipelining."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from lowvram.compat.torch_pipelining import OF_SEVERAL
from lowvram.config.errors import require
from lowvram.core.stages import Pass, Way

GPIPE, ONE_AHEAD, HELD_BACK = "gpipe", "1f1b", "zero_bubble"  # of `SCHEDULES`


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
        schedule: of `SCHEDULES`.
        num_ranks: of the pipeline.
        num_stages: of each rank; its first has the rank's number, each further one `num_ranks` more.
    """
    if schedule == GPIPE:
        return [in_order(rank, num_ranks, 1, num_parts, num_parts, num_parts) for rank in range(num_ranks)]
    in_round = parts_of_a_round(num_ranks, num_parts)
    per_rank = 2 if schedule in OF_SEVERAL else 1  # forward passes ahead of the next rank's
    orders = [
        in_order(rank, num_ranks, num_stages, num_parts, in_round, ahead)
        for rank in range(num_ranks)
        for ahead in [(num_stages - 1) * in_round + per_rank * (num_ranks - 1 - rank)]
    ]
    return [with_held_back(order, rank) for rank, order in enumerate(orders)] if schedule == HELD_BACK else orders


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
    parts: Counter[tuple[int, Way]] = Counter()

    def taken(local: Callable[[int], int], number: int, way: Way) -> Pass:
        stage = local(number // in_round % num_stages) * num_ranks + rank
        parts[stage, way] += 1
        return Pass(stage, parts[stage, way] - 1, way)

    def forward(number: int) -> Pass:
        return taken(lambda local: local, number, Way.FORWARD)

    def backward(number: int) -> Pass:
        return taken(lambda local: num_stages - 1 - local, number, Way.BACKWARD)

    order = [forward(number) for number in range(num_ahead)]
    for number in range(num_passes - num_ahead):
        order += [forward(num_ahead + number), backward(number)]
    return [*order, *(backward(number) for number in range(num_passes - num_ahead, num_passes))]


def with_held_back(order: Sequence[Pass], num_waiting: int) -> list[Pass]:
    """A rank's passes, with what its backward passes hold back behind them: at first so many later."""
    backward = [each for each in order if each.way is Way.BACKWARD]
    held, found, num_backward = iter(backward), list[Pass](), 0
    for each in order:
        found.append(each)
        num_backward += each.way is Way.BACKWARD
        if each.way is Way.BACKWARD and num_backward > num_waiting:
            found.append(next(held)._replace(way=Way.WEIGHTS))
    return [*found, *(each._replace(way=Way.WEIGHTS) for each in held)]


def arrived_before(order: Sequence[Pass], stage: int) -> dict[int, list[int]]:
    """By part: those whose backward passes through a stage come between its forward pass and the one before that.

    Args:
        order: the passes of the stage's rank.
    """
    found, since = dict[int, list[int]](), list[int]()
    for each in order:
        if each.stage == stage and each.way is Way.BACKWARD:
            since.append(each.part)
        if each.stage == stage and each.way is Way.FORWARD:
            found[each.part], since = since, []
    return found
