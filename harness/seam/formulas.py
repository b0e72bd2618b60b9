from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from harness.cell.cell import Cell
from harness.cell.errors import Refused
from harness.cell.schedules import FORWARDS_FIRST, V_SHAPED
from harness.cell.training import Layout, States
from harness.seam.optimizers import optimizer_bytes

if TYPE_CHECKING:
    from harness.workloads import Workload
    from harness.workloads.counts import ModelFacts


KEPT_RESULTS = 2
"""Result buffers of DeepSpeed's last pipeline stage, and minimum input buffers of its first
(DeepSpeed 0.19, runtime/pipe/schedule.py, `num_pipe_buffers`)."""


def model_states(cell: Cell, facts: ModelFacts, shards: float = 1) -> States:
    """Returns the states of one of `shards` equal shards. Module buffers are not sharded. Gradients
    are transient, because zero_grad frees them."""
    return States(
        parameters=facts.parameter_bytes / shards,
        optimizer=optimizer_bytes(cell, facts) / shards,
        library=float(facts.buffer_bytes),
        transient=facts.trained_bytes / shards,
    )


def unit_sizes(workload: Workload, facts: ModelFacts) -> Counter[str]:
    """Returns trained elements of each block by path, and of all else under an empty path."""
    sizes: Counter[str] = Counter()
    for name, size in zip(facts.trainable, facts.sizes, strict=True):
        path = next((path for path in workload.block_paths if name.startswith(f"{path}.")), "")
        number = name.removeprefix(f"{path}.").partition(".")[0]
        sizes[f"{path}.{number}" if path else ""] += size
    return sizes


def fsdp_transient(
    cell: Cell,
    facts: ModelFacts,
    gradients: float,
    reshards: bool = True,
    half: bool = False,
    whole: float | None = None,
    copied: float | None = None,
    flat: bool = False,
) -> float:
    """Returns FSDP's transient bytes: gathered parameters, and gradients before and after their
    reduction. `gradients`: bytes kept until the update; `whole`: bytes of all gradients, if not
    only of trained parameters; `copied`: their bytes in the reduction's precision, if it differs.

    Backward gathers two blocks, one of them prefetched, and all parameters outside blocks.
    Gradients of parameters outside blocks and of one block are whole, next to another block's copy
    (torch 2.13: `foreach_reduce` of FSDP2; FSDP1's flat gradient). Gradients outside blocks are
    copied last: by FSDP2 after their parameters were freed, into a `flat` gradient before. Unless
    FSDP `reshards`, forward ends with the whole model gathered. `half`: gathers half precision.
    Assumes that frozen parameters are spread like trained parameters.
    """
    from harness.workloads import make_workload

    model_bytes, whole = facts.parameter_bytes, whole or facts.trained_bytes
    copied = copied or whole
    if half:
        model_bytes = min(model_bytes, 2 * facts.parameters)
    blocks, total = unit_sizes(make_workload(cell.workload), facts), sum(facts.sizes)
    outside = blocks.pop("", 0)
    first, second = [*(size for _, size in blocks.most_common(2)), 0, 0][:2]
    share = (outside + first) / total
    computed = whole * model_bytes / facts.parameter_bytes if half else whole
    unreduced = share * computed
    reduced = (1 - share) * gradients
    gathered = model_bytes * (outside + first + second) / total
    in_blocks = gathered + unreduced + reduced + copied * second / total
    whole_at_end = model_bytes + 2 * computed if flat else computed + copied
    at_end = whole_at_end * outside / total + (1 - outside / total) * gradients
    in_backward = max(in_blocks, at_end)
    before_backward = model_bytes + unreduced + (reduced if cell.micro_batches > 1 else 0.0)
    return in_backward if reshards else max(in_backward, before_backward)


def facts_of_part(facts: ModelFacts, share: Callable[[str], float]) -> ModelFacts | None:
    """Returns facts of a rank's part of the model; None for partly frozen models, whose frozen
    names are unknown.

    `share`: fraction of a parameter that the rank holds, by name.
    """
    if sum(facts.sizes) != facts.parameters:
        return None
    held = {
        name: round(size * share(name))
        for name, size in zip(facts.trainable, facts.sizes, strict=True)
    }
    of_whole = sum(held.values()) / facts.parameters
    return dataclasses.replace(
        facts,
        trainable=tuple(name for name, size in held.items() if size),
        sizes=tuple(size for size in held.values() if size),
        parameters=sum(held.values()),
        parameter_bytes=round(of_whole * facts.parameter_bytes),
        trained_bytes=round(of_whole * facts.trained_bytes),
    )


def facts_of_stages(
    workload: Workload,
    facts: ModelFacts,
    stages: Collection[int],
    count: int,
    tensor_ranks: int = 1,
) -> ModelFacts | None:
    """Returns facts of a rank with stages `stages` of `count`; None if the model has no split."""
    split = workload.split
    if split is None:
        return None
    numbers = {
        block for stage in stages for block in blocks_of_stage(workload.blocks, stage, count)
    }
    last = count - 1 in stages
    # The last stage has its own copy of a tied parameter.
    tied = set(split.tied.values())

    def held(name: str) -> float:
        if name.startswith(f"{split.blocks}."):
            here = int(name.removeprefix(f"{split.blocks}.").partition(".")[0]) in numbers
            return here / (tensor_ranks if split.is_split(name) else 1)
        if name.startswith(tuple(f"{path}." for path in split.head)):
            return last
        return 0 in stages or (last and name in tied)

    return facts_of_part(facts, held)


def received_bytes(stage: int, count: int, hidden: float) -> float:
    """Returns bytes of a stage's receive buffers, for all micro-batches."""
    return ((stage > 0) + (stage < count - 1)) * hidden


def pipeline_states(
    cell: Cell,
    layout: Layout,
    facts: ModelFacts,
    rank_stages: Sequence[Collection[int]],
    keeps: Callable[[Cell, ModelFacts], States] = model_states,
    buffers: Callable[[int, int, float], float] = received_bytes,
) -> States | None:
    """Returns states of the fullest pipeline rank, including buffers.

    `rank_stages`: each rank's stages. `keeps`: a rank's states from its facts. `buffers`: a stage's
    bytes from its index, the stage count, and the bytes of a rank's hidden states.
    """
    from harness.workloads import make_workload

    hidden, count = hidden_bytes(cell, layout), sum(map(len, rank_stages))
    if hidden is None:
        return None
    workload = make_workload(cell.workload)
    fullest: States | None = None
    for stages in rank_stages:
        part = facts_of_stages(workload, facts, stages, count, layout.tensor)
        if part is None:
            return None
        states = keeps(cell, part)
        in_buffers = sum(buffers(stage, count, hidden) for stage in stages)
        states = dataclasses.replace(states, library=states.library + in_buffers)
        if fullest is None or states.total > fullest.total:
            fullest = states
    return fullest


def whole_model_states(cell: Cell, facts: ModelFacts) -> States:
    """Returns DDP's states: those of the whole model, plus gradient buckets."""
    states = model_states(cell, facts)
    return dataclasses.replace(states, library=states.library + facts.trained_bytes)


def all_reduced(ranks: int, size: float) -> float:
    """Returns bytes each rank must send to all-reduce `size` bytes."""
    return 2 * passed_once(ranks, size)


def in_half(facts: ModelFacts) -> float:
    """Returns the bytes of gradients sent in 16 bits, or in their own type if that takes fewer."""
    return min(facts.trained_bytes, 2.0 * sum(facts.sizes))


def passed_once(ranks: int, size: float) -> float:
    """Returns bytes each rank sends in a reduce-scatter, all-gather or average broadcast."""
    return (ranks - 1) / ranks * size


def hidden_bytes(cell: Cell, layout: Layout) -> float | None:
    """Returns bytes of one block's hidden states for a rank's samples in a step; None unless the
    precision is fp32."""
    from harness.workloads import make_workload

    if cell.precision != "fp32":
        return None
    hidden = make_workload(cell.workload).hidden_size
    return 4.0 * cell.global_batch // layout.data * cell.sequence_length * hidden


def logits_bytes(workload: Workload, samples: int, tokens: int) -> float:
    return 4.0 * samples * (workload.num_labels or tokens * workload.vocabulary)


def dealt_out_states(states: States, facts: ModelFacts, ranks: int) -> States:
    """Returns the fullest rank's states when sharded by ZeroRedundancyOptimizer."""
    share = fullest_share(sorted(facts.sizes, reverse=True), ranks) / sum(facts.sizes)
    return dataclasses.replace(states, optimizer=states.optimizer * share)


def fullest_share(sizes: Iterable[int], ranks: int) -> int:
    """Returns the fullest rank's elements if each tensor goes to the emptiest rank."""
    shares = [0] * ranks
    for size in sizes:
        shares[shares.index(min(shares))] += size
    return max(shares)


def blocks_of_stage(blocks: int, stage: int, stages: int) -> range:
    return range(blocks * stage // stages, blocks * (stage + 1) // stages)


def check_micro_batches(schedule: str, ranks: int, micro_batches: int) -> None:
    """Raises Refused if torch's schedule does not accept this many micro-batches."""
    if schedule == "1f1b" and micro_batches < ranks:
        raise Refused(
            f"schedule 1f1b needs a micro-batch for each of its {ranks} stages, but the cell has"
            f" {micro_batches}"
        )
    if schedule == "dualpipev" and micro_batches < 2 * ranks:
        raise Refused(
            f"schedule dualpipev needs a micro-batch for each of its {2 * ranks} stages, two per"
            f" rank, but the cell has {micro_batches}"
        )
    rounds = max(1, micro_batches // ranks)
    if schedule.startswith("interleaved") and micro_batches % rounds:
        raise Refused(
            f"schedule {schedule} runs {micro_batches} micro-batches on {ranks} ranks in {rounds}"
            f" rounds, into which they do not divide; use a multiple of {ranks}"
        )


def in_flight(schedule: str, rank: int, ranks: int, stages: int, micro_batches: int) -> int:
    """Returns the maximum number of forwards of its stages that a rank has run but not taken back.

    1F1B warms up with one forward per further rank. The interleaved schedule (arXiv 2104.04473,
    section 2.2) warms up with two, and with a round of one micro-batch per rank for each further
    stage. V-shaped schedules keep as much as 1F1B, and DualPipeV a pair more (arXiv 2401.10241,
    2412.19437).
    """
    every = stages * micro_batches
    if schedule in FORWARDS_FIRST:
        return every
    if schedule in V_SHAPED:
        return min(every, 2 * ranks + (schedule == "dualpipev"))
    if stages == 1 and schedule == "1f1b":
        return min(every, ranks - rank)
    of_round = micro_batches // max(1, micro_batches // ranks)
    return min(every, (stages - 1) * of_round + 2 * (ranks - 1 - rank) + 1)
