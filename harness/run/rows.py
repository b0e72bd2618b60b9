from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone

from harness.host.cores import cores_of_nodes, oversubscribed
from harness.host.environment import environment, gpus
from harness.host.gpu_models import peak_flops_per_second
from harness.launch.outcome import Outcome
from harness.measure.clock import bubble_fraction
from harness.parity.deviations import largest
from harness.parity.reference import Noise
from harness.parity.verdict import ParityVerdict
from harness.record.hardware_facts import (
    SpeedMeasurement,
    distinct_cores,
    matmul_rate,
    shared_machine,
)
from harness.record.plan import Plan
from harness.record.run_record import RunRecord, StepRecord
from harness.record.schema import VERSION
from harness.record.store import Store, TrialKey
from harness.record.trial import TrialRecord
from harness.run.metrics import Peaks, with_metrics
from harness.run.prepared import PreparedTrial, Surroundings
from harness.spec.cell import Cell
from harness.strategy.registry import required_packages, stand_in_of
from harness.worker.rank_answer import RankAnswer
from harness.workloads.counts import model_facts
from harness.workloads.workload import Workload
from harness.workloads.workload_variants import FLOAT8


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
        **environment(required_packages()),
    )


def device_speed_of(store: Store, plan: Plan) -> str | None:
    return store.run_row(plan.run_id)["device_speed"] if plan.needs_gpu else None


def peaks_of(cell: Cell, workload: Workload, device_speed: str | None) -> Peaks:
    """Returns a GPU's FLOP/s in a cell's precision. `device_speed`: the run's column."""
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
class RewindCheck:
    """Parity of steps trained again after rewinds."""

    count: int
    why_not: str
    loss_deviation: float | None
    update_deviation: float | None

    @classmethod
    def of(cls, verdicts: Sequence[ParityVerdict], why_not: str) -> RewindCheck:
        """`why_not`: the reason if there are no rewinds."""
        losses = [v.max_loss_deviation for v in verdicts if v.max_loss_deviation is not None]
        updates = [v.max_update_deviation for v in verdicts if v.max_update_deviation is not None]
        return cls(
            len(verdicts),
            "" if verdicts else why_not,
            max(losses, default=None),
            max(updates, default=None),
        )


@dataclass(frozen=True)
class Verification:
    verdict: ParityVerdict | None
    reference_losses: Sequence[float]
    noise: Noise | None
    fp32_loss_deviation: float | None
    later_deviations: tuple[float, ...] = ()
    """Relative loss deviations after the parity segment."""
    rewinds: RewindCheck | None = None
    """None if the trial was not compared, or diverged within the parity segment."""


def trial_record(
    run_id: str,
    prepared: PreparedTrial,
    outcome: Outcome,
    verification: Verification,
    surroundings: Surroundings,
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
    trial = _with_verification(trial, verification)
    trial = surroundings.noted_in(trial, prepared.gpus, outcome)
    trial = replace(trial, **outcome.checkpoint)
    facts = model_facts(prepared.workload, cell.sequence_length)
    trial = replace(trial, parameters=facts.parameters, trained_parameters=sum(facts.sizes))
    if formula := strategy.costs.states(cell, prepared.layout, facts):
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
    added = strategy.costs.recomputed_flops(cell, prepared.workload)
    trial = replace(trial, hardware_flops_per_step=(trial.flops_per_step or 0.0) + added)
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
        wraps_ddp=strategy.ddp_equivalent_of(cell),
        stand_in=stand_in,
        oversubscribed=oversubscribed(cell, cores, layout.processes),
        launcher=outcome.launcher,
    )
    if not nodes:
        return trial
    names = tuple(node["name"] for node in nodes)
    return replace(trial, node_names=names, node_facts=json.dumps(nodes), **outcome.link)


def _with_verification(trial: TrialRecord, verification: Verification) -> TrialRecord:
    noise = verification.noise
    trial = replace(
        trial,
        reference_losses=tuple(verification.reference_losses),
        reference_loss_noise=noise.loss if noise else None,
        reference_update_noise=noise.update if noise else None,
        fp32_loss_deviation=verification.fp32_loss_deviation,
        later_steps_verified=len(verification.later_deviations),
        later_loss_deviation=largest(verification.later_deviations),
    )
    check = verification.rewinds
    if check is None:
        return trial
    return replace(
        trial,
        rewinds=check.count,
        rewind_skipped_reason=check.why_not or None,
        rewind_loss_deviation=check.loss_deviation,
        rewind_update_deviation=check.update_deviation,
    )


def _with_verdict(trial: TrialRecord, verdict: ParityVerdict, may_diverge: bool) -> TrialRecord:
    """Adds the verdict. A trial that trained something else becomes `diverged`; an unknown verdict
    is expected unless the reference is missing."""
    columns = {f"parity_{name}": value for name, value in asdict(verdict).items()}
    trial = replace(trial, **columns)
    if verdict.verdict == "unknown":
        declared = verdict.max_loss_deviation is not None  # else there is no reference
        reason = f"not verified, so not ranked: {verdict.reason}"
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
