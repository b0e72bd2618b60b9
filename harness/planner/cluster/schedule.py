"""A pipeline's schedule, simulated: what the closed form of the step time approximates."""

from __future__ import annotations

import numpy as np

from harness.planner.cluster.layouts import Floats


def one_forward_one_backward(forward: Floats, backward: Floats, micro_batches: int) -> Floats:
    """Seconds that a step takes under 1F1B (PipeDream-2BW, arXiv 2006.09503), shape [layouts].

    `forward` and `backward` are seconds of a micro-batch in each stage, shape [layouts, stages].
    Stage s runs `stages - s - 1` forwards first (fewer if there are not so many micro-batches),
    then a forward and a backward by turns, then the backwards that are left. A micro-batch is sent
    on without delay.
    """
    layouts, stages = forward.shape
    ready_forward = np.full((layouts, stages + 1, micro_batches), -1.0)
    ready_backward = np.full((layouts, stages + 1, micro_batches), -1.0)
    ready_forward[:, 0, :] = 0.0
    clock = np.zeros((layouts, stages))
    orders = [_order(stage, stages, micro_batches) for stage in range(stages)]
    places = [0] * stages
    left = 2 * stages * micro_batches
    while left:
        before = left
        for stage in range(stages):
            while places[stage] < 2 * micro_batches:
                is_forward, batch = orders[stage][places[stage]]
                if is_forward:
                    ready = ready_forward[:, stage, batch]
                elif stage == stages - 1:
                    ready = ready_forward[:, stages, batch]
                else:
                    ready = ready_backward[:, stage + 1, batch]
                if ready[0] < 0:
                    break
                duration = forward[:, stage] if is_forward else backward[:, stage]
                clock[:, stage] = np.maximum(clock[:, stage], ready) + duration
                target = ready_forward[:, stage + 1] if is_forward else ready_backward[:, stage]
                target[:, batch] = clock[:, stage]
                places[stage] += 1
                left -= 1
        assert left < before, "1F1B cannot deadlock"
    result: Floats = clock.max(axis=1)
    return result


def _order(stage: int, stages: int, micro_batches: int) -> list[tuple[bool, int]]:
    """What a stage runs, in order: whether it is a forward, and of which micro-batch."""
    first = min(stages - stage - 1, micro_batches)
    order = [(True, batch) for batch in range(first)]
    for batch in range(micro_batches - first):
        order += [(True, first + batch), (False, batch)]
    return order + [(False, batch) for batch in range(micro_batches - first, micro_batches)]
