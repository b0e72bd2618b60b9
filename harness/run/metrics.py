from __future__ import annotations

import itertools
import json
import math
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeVar

from harness.analysis.cell_result import NOT_CHECKED
from harness.analysis.consistency import first_known, mean_losses, passes
from harness.analysis.stats import mean_of_cycles, over_cycles, percentile, slowest, trend
from harness.analysis.summary import mfu
from harness.cell.cell import Cell
from harness.cell.redaction import redacted
from harness.host.cores import cores_of_nodes, oversubscribed
from harness.host.environment import environment, gpus
from harness.host.gpu_models import peak_flops_per_second
from harness.host.gpu_state import as_json
from harness.launch.outcome import Outcome
from harness.measure.clock import bubble_fraction
from harness.measure.peak_memory import imbalance
from harness.measure.rank_traffic import ExpertTokens, imbalance_of_experts
from harness.measure.resource_use import CpuTime, foreign_load
from harness.parity.reference import Noise, largest
from harness.parity.verdict import ParityVerdict
from harness.record.files import VERSION
from harness.record.plan import Plan
from harness.record.run_record import RankStep, RunRecord, StepRecord
from harness.record.store import Store, TrialKey
from harness.record.trial import (
    SpeedMeasurement,
    TrialRecord,
    distinct_cores,
    matmul_rate,
    shared_machine,
)
from harness.run.prepared import PreparedTrial
from harness.seam.differences import differences_of
from harness.seam.registry import required_packages, stand_in_of
from harness.worker.rank_answer import RankAnswer, TrainedAnswer
from harness.workloads.counts import ModelFacts, model_facts
from harness.workloads.workload import Workload
from harness.workloads.workload_variants import FLOAT8

Number = TypeVar("Number", int, float)
WINDOW_STEPS = 8
"""Number of timed steps whose times are averaged; slow spells of a machine last longer."""


@dataclass(frozen=True)
class Peaks:
    """FLOP/s of one device in a cell's precision. Unknown rates are None."""

    datasheet: float | None = None
    matmul: float | None = None


def with_metrics(
    trial: TrialRecord,
    cell: Cell,
    answers: Sequence[RankAnswer],
    facts: ModelFacts,
    peaks: Peaks,
    cycle: int = 1,
) -> TrialRecord:
    """Adds the measurements of a trial's finished ranks. `cycle`: number of steps after which the
    strategy's work repeats."""
    ranks = [answer.trained for answer in answers if answer.trained]
    trial = _with_speed(trial, cell, ranks, facts, peaks, cycle)
    trial = _with_windows(trial, ranks, cycle)
    trial = _with_memory(trial, ranks)
    trial = _with_gpus(trial, ranks)
    trial = _with_states(trial, ranks)
    trial = _with_traffic(trial, ranks)
    trial = _with_experts(trial, ranks)
    norms = first_known([[step.gradient_norm for step in rank.steps] for rank in ranks])
    joules = _joules_per_step(answers, cell.device)
    return replace(
        trial,
        setup_seconds=max(rank.setup_seconds for rank in ranks),
        first_step_seconds=max(rank.steps[0].step_seconds for rank in ranks),
        compile_seconds=max(all_known([rank.compile_seconds for rank in ranks]), default=None),
        restarts=max(rank.restarts for rank in ranks),
        steps_taken=len(ranks[0].steps),
        losses=_with_gaps(_losses(ranks)),
        gradient_norms=() if norms.count(None) == len(norms) else _with_gaps(norms),
        rank_cores=tuple(rank.cores for rank in ranks),
        foreign_load_cores=_foreign_load(answers),
        energy_joules_per_sample=None if joules is None else joules / cell.global_batch,
    )


def _joules_per_step(answers: Sequence[RankAnswer], device: str) -> float | None:
    """Sums the ranks' energy. Nodes of one machine report the same CPU packages, so only one node
    counts."""
    nodes: dict[str | None, dict[int | None, float]] = {}
    for answer in answers:
        if answer.trained:
            joules = answer.trained.joules_per_step
            if joules is None:
                return None
            of_machine = nodes.setdefault(answer.machine, {})
            of_machine[answer.node] = of_machine.get(answer.node, 0.0) + joules
    return sum(
        max(of_nodes.values()) if device == "cpu" else sum(of_nodes.values())
        for of_nodes in nodes.values()
    )


def _with_gaps(values: Sequence[float | None]) -> tuple[float, ...]:
    return tuple(math.nan if value is None else value for value in values)


def _losses(ranks: Sequence[TrainedAnswer]) -> list[float | None]:
    all_losses = mean_losses([[step.loss for step in rank.steps] for rank in ranks])
    losses: list[float | None] = []
    for part in passes(all_losses, [step.training_step for step in ranks[0].steps]):
        losses += part.since(len(losses))
    return losses


def _with_speed(
    trial: TrialRecord,
    cell: Cell,
    ranks: Sequence[TrainedAnswer],
    facts: ModelFacts,
    peaks: Peaks,
    cycle: int,
) -> TrialRecord:
    timed = [[step for step in rank.steps if step.phase == "timed"] for rank in ranks]
    seconds = timed_seconds([rank.steps for rank in ranks])
    fetches = slowest([[step.data_seconds for step in rank] for rank in timed])
    numbers = [step.step for step in timed[0]]
    typical = percentile(over_cycles(seconds, numbers, cycle), 0.5)
    slices = _time_slices(ranks[0].time_slices, seconds, numbers, cycle)
    flops = float(facts.flops_per_sample * cell.global_batch) or None
    tokens = cell.global_batch * cell.sequence_length if cell.has_tokens else None
    return replace(
        trial,
        step_seconds_p50=percentile(seconds, 0.5),
        step_seconds_p95=percentile(seconds, 0.95),
        step_seconds_mean=sum(seconds) / len(seconds),
        data_seconds_p50=percentile(fetches, 0.5),
        samples_per_second=cell.global_batch / typical,
        tokens_per_second=None if tokens is None else tokens / typical,
        turn_began=tuple(began for began, _ in slices),
        turn_samples_per_second=tuple(cell.global_batch / step for _, step in slices),
        trend=trend(seconds),
        flops_per_step=flops,
        mfu=mfu(flops, typical, cell.devices, peaks.datasheet),
        matmul_utilization=mfu(flops, typical, cell.devices, peaks.matmul),
    )


def _with_windows(trial: TrialRecord, ranks: Sequence[TrainedAnswer], cycle: int) -> TrialRecord:
    together = list(zip(*(rank.steps for rank in ranks), strict=True))
    timed = [number for number, steps in enumerate(together) if steps[0].phase == "timed"]
    seconds = timed_seconds([rank.steps for rank in ranks])
    size = cycle * max(1, round(WINDOW_STEPS / cycle))
    count = max(1, len(seconds) // size)
    steps, means, slowest_ones = [], [], []
    for number in range(count):
        # The last window takes the remaining steps.
        part = slice(number * size, (number + 1) * size if number < count - 1 else None)
        within = _pauses([together[at] for at in timed[part]])
        if not within:
            return trial
        # The control before a window also shows how fast the machine is in its first steps.
        pauses = _pauses(together[: timed[part][0]])[-1:] + within
        numbers = [together[at][0].step for at in timed[part]]
        steps.append(mean_of_cycles(seconds[part], numbers, cycle))
        means.append(statistics.fmean(map(statistics.fmean, pauses)))
        slowest_ones.append(statistics.fmean(map(max, pauses)))
    return replace(
        trial,
        window_step_seconds=tuple(steps),
        window_control_seconds=tuple(means),
        window_slowest_control_seconds=tuple(slowest_ones),
    )


def _pauses(steps: Sequence[Sequence[RankStep]]) -> list[list[float]]:
    per_step = (
        [r.control_seconds for r in step if r.control_seconds is not None] for step in steps
    )
    return [seconds for seconds in per_step if seconds]


def timed_seconds(by_rank: Sequence[Sequence[RankStep]]) -> list[float]:
    """Returns the time of each timed step: from the slowest rank finishing the previous step to it
    finishing this one.

    Each step's maximum over ranks would count waits twice, so times are summed per rank from a
    common start: the first timed step, or the first after a pause. `by_rank`: each rank's steps.
    """
    seconds: list[float] = []
    ended, last = [0.0] * len(by_rank), 0.0
    for steps in zip(*by_rank, strict=True):
        if steps[0].phase == "timed":
            ended = [at + step.step_seconds for at, step in zip(ended, steps, strict=True)]
            seconds.append(max(ended) - last)
            last = max(ended)
        if steps[0].phase != "timed" or any(step.left_over_seconds is not None for step in steps):
            ended, last = [0.0] * len(by_rank), 0.0
    return seconds


def _time_slices(
    begins: Sequence[tuple[int, float]], steps: Sequence[float], numbers: Sequence[int], cycle: int
) -> list[tuple[float, float]]:
    """Returns each turn's start, in seconds after the epoch, and typical step seconds. `numbers`:
    step numbers of `steps`."""
    slices = []
    for (first, began), (end, _) in itertools.pairwise([*begins, (math.inf, 0.0)]):
        steps_of_slice = [i for i, number in enumerate(numbers) if first <= number < end]
        if steps_of_slice:
            cycles = over_cycles(
                [steps[i] for i in steps_of_slice], [numbers[i] for i in steps_of_slice], cycle
            )
            slices.append((began, percentile(cycles, 0.5)))
    return slices


def _with_memory(trial: TrialRecord, ranks: Sequence[TrainedAnswer]) -> TrialRecord:
    """Adds the peaks of ranks that are measured like rank 0, which excludes parameter servers. A
    process with several devices, as of DataParallel, counts as one rank per device."""
    method = ranks[0].memory_method
    peaks = all_known([p for rank in ranks if rank.memory_method == method for p in rank.peaks])
    reserved = [r for rank in ranks if (r := rank.reserved_memory_bytes) is not None]
    return replace(
        trial,
        memory_method=method,
        peak_memory_bytes=max(peaks, default=None),
        peak_memory_bytes_by_rank=peaks,
        memory_imbalance=imbalance(list(peaks)) if peaks else None,
        reserved_memory_bytes=max(reserved, default=None),
        setup_peak_memory_bytes=max(
            all_known([r.setup_peak_memory_bytes for r in ranks if r.memory_method == method]),
            default=None,
        ),
    )


def _with_gpus(trial: TrialRecord, ranks: Sequence[TrainedAnswer]) -> TrialRecord:
    driving = [(rank, rank.gpu_use) for rank in ranks if rank.gpu_use is not None]
    uses = [use for _, use in driving]
    if not uses:
        return trial
    return replace(
        trial,
        gpu_use=as_json(uses),
        reserved_memory_bytes_by_rank=all_known([r.reserved_memory_bytes for r, _ in driving]),
        nvml_memory_bytes_by_rank=all_known([use.process_bytes for use in uses]),
        context_memory_bytes_by_rank=all_known([use.context_bytes for use in uses]),
        host_peak_memory_bytes_by_rank=all_known([r.host_peak_bytes for r, _ in driving]),
    )


def _with_states(trial: TrialRecord, ranks: Sequence[TrainedAnswer]) -> TrialRecord:
    states = [rank.states for rank in ranks]
    fullest = max(states, key=lambda rank: rank.state_bytes["library"])

    def bytes_by_rank(kind: str) -> tuple[int, ...]:
        return tuple(rank.state_bytes[kind] for rank in states)

    def distinct(dtypes: Sequence[Sequence[str]]) -> tuple[str, ...]:
        return tuple(sorted(set(itertools.chain.from_iterable(dtypes))))

    return replace(
        trial,
        held_parameters=tuple(rank.held_parameters for rank in states),
        parameter_dtypes=distinct([rank.parameter_dtypes for rank in states]),
        gradient_dtypes=distinct([rank.gradient_dtypes for rank in states]),
        optimizer_state_dtypes=distinct([rank.optimizer_state_dtypes for rank in states]),
        collectives=distinct([rank.collectives for rank in ranks]),
        parameter_bytes=bytes_by_rank("parameters"),
        gradient_bytes=bytes_by_rank("gradients"),
        optimizer_bytes=bytes_by_rank("optimizer"),
        library_bytes=bytes_by_rank("library"),
        host_state_bytes=bytes_by_rank("host"),
        library_buffers=json.dumps(fullest.library_buffers),
    )


def _with_traffic(trial: TrialRecord, ranks: Sequence[TrainedAnswer]) -> TrialRecord:
    trial = replace(
        trial, sent_bytes_per_step=all_known([rank.sent_bytes_per_step for rank in ranks])
    )
    offload = [rank.offload for rank in ranks if rank.offload]
    if not offload:
        return trial
    read, written = all_known([o.read for o in offload]), all_known([o.written for o in offload])
    return replace(
        trial,
        offload_read_bytes_per_step=sum(read) if read else None,
        offload_written_bytes_per_step=sum(written) if written else None,
        # All ranks see the same folder.
        offload_kept_bytes=max(o.folder_bytes for o in offload),
    )


def _with_experts(trial: TrialRecord, ranks: Sequence[TrainedAnswer]) -> TrialRecord:
    counts: ExpertTokens = {}
    for rank in ranks:
        for block, tokens in (rank.expert_tokens or {}).items():
            before = counts.get(block, (0,) * len(tokens))
            counts[block] = tuple(a + b for a, b in zip(before, tokens, strict=True))
    if not counts:
        return trial
    return replace(
        trial,
        expert_tokens=json.dumps([counts[block] for block in sorted(counts)]),
        expert_imbalance=imbalance_of_experts(counts),
    )


def _foreign_load(answers: Sequence[RankAnswer]) -> float | None:
    by_machine: dict[str | None, list[CpuTime]] = {}
    for answer in answers:
        if answer.trained:
            by_machine.setdefault(answer.machine, []).append(answer.trained.cpu_time)
    return max(all_known([foreign_load(loads) for loads in by_machine.values()]), default=None)


def all_known(values: Sequence[Number | None]) -> tuple[Number, ...]:
    present = tuple(value for value in values if value is not None)
    return present if len(present) == len(values) else ()


def new_run(plan: Plan, measure_gpu: Callable[[], SpeedMeasurement]) -> RunRecord:
    """Builds the run's row, measuring GPU 0 if any cell needs a GPU."""
    speed = measure_gpu().as_json if plan.needs_gpu else None
    return RunRecord(
        schema_version=VERSION,
        run_id=plan.run_id,
        started_at=datetime.now(timezone.utc),
        matrix=plan.matrix,
        plan=plan.to_json(),
        device_speed=speed,
        command=command_line(*sys.argv),
        **environment(required_packages()),
    )


def command_line(program: str, *arguments: str) -> str | None:
    """Returns a process's arguments as a command to repeat, without secrets; None if they are not
    of the suite's command."""
    if Path(program).stem not in ("__main__", "parallelism-bench"):
        return None
    return redacted(shlex.join(["python", "-m", "bench", *arguments]))


def device_speed_of(store: Store, plan: Plan) -> str | None:
    return store.run_row(plan.run_id)["device_speed"] if plan.needs_gpu else None


def peaks_of(cell: Cell, workload: Workload, device_speed: str | None) -> Peaks:
    """Returns a GPU's FLOP/s in a cell's precision. `device_speed`: that column of the run."""
    if cell.device != "cuda":
        return Peaks()
    precision = workload.arithmetic or cell.precision
    name = gpus()[0][0] if gpus() else None
    measured = "fp8" if FLOAT8 in workload.suffixes else precision
    return Peaks(peak_flops_per_second(name, precision), matmul_rate(device_speed, measured))


def left_out_record(
    run_id: str, cell: Cell, status: str, reason: str, attempt: int = 1, position: int = -1
) -> TrialRecord:
    return TrialRecord.of(
        cell,
        schema_version=VERSION,
        run_id=run_id,
        trial=0,
        attempt=attempt,
        position=position,
        status=status,
        reason=reason,
        started_at=datetime.now(timezone.utc),
        oversubscribed=oversubscribed(cell, cores_of_nodes(cell)),
    )


@dataclass(frozen=True)
class Verification:
    verdict: ParityVerdict | None
    reference_losses: Sequence[float]
    noise: Noise | None
    fp32_loss_deviation: float | None
    later_deviations: tuple[float, ...] = ()
    """Relative loss deviations after the parity segment."""
    rewinds: Sequence[ParityVerdict] | None = None
    """Verdicts on steps trained again after rewinds. None if the trial was not compared, or
    diverged within the parity segment."""
    verified_steps: int | None = None
    """Number of the trial's steps that were compared. None if it is not verified."""
    sketched_after: tuple[int, ...] = ()
    """Numbers of steps after which ranks sketched their parameters."""
    long: Verification | None = None
    """Result of the long training; see harness/run/long_training.py."""


def trial_record(
    run_id: str,
    prepared: PreparedTrial,
    outcome: Outcome,
    verification: Verification,
    peaks: Peaks,
) -> TrialRecord:
    cell, strategy = prepared.cell, prepared.strategy
    trial = replace(
        left_out_record(run_id, cell, outcome.status, outcome.reason),
        trial=prepared.key.trial,
        attempt=prepared.key.attempt,
        position=prepared.position,
        log_tail=outcome.log_tail,
        stacks=outcome.stacks,
        started_at=datetime.fromtimestamp(outcome.started_at, timezone.utc),
        wall_seconds=outcome.wall_seconds or None,
        startup_seconds=outcome.startup_seconds,
        data_fingerprint=prepared.launch.data.fingerprint,
    )
    trial = _with_placement(trial, prepared, outcome)
    trial = _with_verification(trial, verification, prepared.rewind_skipped_reason)
    trial = replace(trial, **outcome.checkpoint)
    facts = ModelFacts((), 0, 0, ())  # a script has another model than its control
    if not strategy.capabilities.unverified:
        facts = model_facts(prepared.workload, cell.sequence_length)
        trial = replace(trial, parameters=facts.parameters, trained_parameters=sum(facts.sizes))
    if formula := strategy.states(cell, prepared.layout, facts):
        trial = replace(
            trial,
            formula_parameter_bytes=formula.parameters,
            formula_gradient_bytes=formula.gradients,
            formula_optimizer_bytes=formula.optimizer,
            formula_library_bytes=formula.library,
            formula_transient_bytes=formula.transient,
        )
    if outcome.status == "out_of_memory":
        trial = _with_shortage(trial, outcome.answers)
    if outcome.status != "ok" or verification.verdict is None:
        return trial
    trial = with_metrics(trial, cell, outcome.answers, facts, peaks, strategy.cycle)
    added = strategy.recomputed_flops(cell, prepared.workload)
    trial = replace(trial, hardware_flops_per_step=(trial.flops_per_step or 0.0) + added or None)
    busy = [a.busy_fraction for a in outcome.trained if a.busy_fraction is not None]
    trial = replace(trial, bubble_fraction=bubble_fraction(busy) if busy else None)
    return _with_verdict(trial, verification.verdict, cell.expect == "diverged")


def _with_placement(trial: TrialRecord, prepared: PreparedTrial, outcome: Outcome) -> TrialRecord:
    cell, layout, strategy = prepared.cell, prepared.layout, prepared.strategy
    nodes = outcome.nodes
    emulation = outcome.link.get("link_emulation")
    stand_in = stand_in_of(strategy, cell, prepared.workload) or shared_machine(nodes, emulation)
    cores = distinct_cores(nodes) if nodes else cores_of_nodes(cell)
    trial = replace(
        trial,
        processes=layout.processes,
        data_parallel=layout.data,
        pipeline_parallel=layout.pipeline,
        tensor_parallel=layout.tensor,
        sequence_parallel=layout.sequence,
        packages=strategy.requires,
        differences=differences_of(strategy, cell),
        wraps_ddp=strategy.ddp_equivalent_of(cell),
        stand_in=stand_in,
        oversubscribed=oversubscribed(cell, cores, layout.processes),
        launcher=outcome.launcher,
    )
    if not nodes:
        return trial
    names = tuple(node["name"] for node in nodes)
    return replace(trial, node_names=names, node_facts=json.dumps(nodes), **outcome.link)


def _with_verification(
    trial: TrialRecord, verification: Verification, why_not_rewound: str
) -> TrialRecord:
    noise = verification.noise
    trial = replace(
        trial,
        reference_losses=tuple(verification.reference_losses),
        reference_loss_noise=noise.loss if noise else None,
        reference_update_noise=noise.update if noise else None,
        fp32_loss_deviation=verification.fp32_loss_deviation,
        later_steps_verified=len(verification.later_deviations),
        later_loss_deviation=largest(verification.later_deviations),
        verified_steps=verification.verified_steps,
    )
    if (long := verification.long) and long.verdict and long.verdict.verdict != "unknown":
        trial = replace(
            trial,
            long_sketched_after=long.sketched_after,
            long_update_deviation=long.verdict.max_update_deviation,
        )
    verdicts = verification.rewinds
    if verdicts is None:
        return trial
    losses = [v.max_loss_deviation for v in verdicts if v.max_loss_deviation is not None]
    updates = [v.max_update_deviation for v in verdicts if v.max_update_deviation is not None]
    return replace(
        trial,
        rewinds=len(verdicts),
        rewind_skipped_reason=None if verdicts else why_not_rewound or None,
        rewind_loss_deviation=max(losses, default=None),
        rewind_update_deviation=max(updates, default=None),
    )


def _with_verdict(trial: TrialRecord, verdict: ParityVerdict, may_diverge: bool) -> TrialRecord:
    """Adds the verdict. A trial that trained something else becomes `diverged`; an unknown verdict
    is expected unless the reference is missing."""
    columns = {f"parity_{name}": value for name, value in asdict(verdict).items()}
    trial = replace(trial, **columns)
    if verdict.verdict == NOT_CHECKED:
        return replace(trial, reason=verdict.reason, expected=True)
    if verdict.verdict == "unknown":
        declared = verdict.max_loss_deviation is not None  # else there is no reference
        reason = f"not verified: {verdict.reason}"
        return replace(trial, reason=reason, expected=declared)
    if verdict.verdict == "diverged":
        return replace(trial, status="diverged", reason=verdict.reason, expected=may_diverge)
    return trial


def _with_shortage(trial: TrialRecord, answers: Sequence[RankAnswer]) -> TrialRecord:
    failures = [a.failure for a in answers if a.failure and a.failure.failed_in]
    if not failures:
        return trial
    first = min(failures, key=lambda failure: failure.failed_at)
    return replace(trial, failed_in=first.failed_in, failed_holding=json.dumps(first.holding))


def step_records(run_id: str, key: TrialKey, answers: Sequence[RankAnswer]) -> Iterator[StepRecord]:
    for answer in answers:
        for step in answer.trained.steps if answer.trained else ():
            yield StepRecord(
                run_id=run_id,
                cell_id=key.cell_id,
                trial=key.trial,
                attempt=key.attempt,
                rank=answer.rank,
                **vars(step),
            )
