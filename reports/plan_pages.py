"""What a plan's page shows, from the planner's answers."""

from __future__ import annotations

from collections.abc import Sequence

from harness.planner.cluster.cluster_plan import Candidate, Plan
from harness.planner.cluster.sweep import Square
from harness.planner.local.local_plan import CpuCandidate, CpuPlan
from reports.prediction_page import PlanPage, PlanRow, WonRow, WonSquare, plan_page

MOST_ROWS = 20


def cluster_page(plan: Plan, sentences: Sequence[str], source: str, squares: list[Square]) -> str:
    """The page of a plan for devices that nobody has rented yet."""
    question = plan.question
    models = list(dict.fromkeys(square.model for square in squares))
    return plan_page(
        PlanPage(
            f"{question.shape.name} on {question.devices} x {question.cluster.device}",
            (
                f"{question.global_batch} sequences of {question.sequence_length} tokens a step",
                f"{plan.considered} layouts",
                f"constants: {source}",
            ),
            (_choice(plan.candidates[0]), *sentences),
            tuple(_row(candidate) for candidate in plan.candidates[:MOST_ROWS]),
            "tokens/s",
            tuple(
                WonRow(model, tuple(_square(one) for one in squares if one.model == model))
                for model in models
            ),
        )
    )


def _choice(best: Candidate) -> str:
    return (
        f"Use {best.strategy}: {best.layout.text}. A step takes {best.seconds:.3g} s, which is"
        f" {best.tokens_per_second:,.0f} tokens/s."
    )


def _row(candidate: Candidate) -> PlanRow:
    return PlanRow(
        f"{candidate.strategy}: {candidate.layout.text}",
        f"{candidate.seconds:.3g} s ({candidate.seconds_low:.3g} to {candidate.seconds_high:.3g})",
        f"{candidate.tokens_per_second:,.0f}",
        f"{candidate.reserved_bytes / 1e9:.1f} GB ({candidate.reserved_low / 1e9:.0f} to"
        f" {candidate.reserved_high / 1e9:.0f})",
        "prediction",
    )


def _square(square: Square) -> WonSquare:
    return WonSquare(
        square.devices,
        square.winner,
        square.tokens_per_second,
        square.tokens_low,
        square.tokens_high,
        square.memory_bytes,
        square.memory_low,
        square.memory_high,
        square.reason,
    )


def here_page(
    plan: CpuPlan,
    sentences: Sequence[str],
    machine: str,
    swept: dict[str, dict[int, CpuPlan | str]],
) -> str:
    """The page of a plan for this machine. `swept`: by workload and number of ranks its plan, or
    why nothing can run."""
    candidates = (*plan.candidates, *plan.inexact)
    return plan_page(
        PlanPage(
            plan.setting,
            (machine, f"from {plan.calibrated_on} measured cells"),
            tuple(sentences),
            tuple(_here_row(candidate) for candidate in candidates[:MOST_ROWS]),
            "samples/s",
            tuple(
                WonRow(
                    workload,
                    tuple(_here_square(devices, answer) for devices, answer in of_one.items()),
                )
                for workload, of_one in swept.items()
            ),
        )
    )


def _here_row(candidate: CpuCandidate) -> PlanRow:
    low, high = candidate.seconds_low * 1e3, candidate.seconds_high * 1e3
    return PlanRow(
        candidate.label if candidate.exact else f"{candidate.label} (another training)",
        f"{candidate.seconds * 1e3:.0f} ms ({low:.0f} to {high:.0f})",
        f"{candidate.samples_per_second:.1f}",
        f"{candidate.peak_bytes / 1e6:.0f} MB ({candidate.peak_low / 1e6:.0f} to"
        f" {candidate.peak_high / 1e6:.0f})",
        "measurement" if candidate.measured else "prediction",
    )


def _here_square(devices: int, answer: CpuPlan | str) -> WonSquare:
    if isinstance(answer, str) or not answer.candidates:
        reason = answer if isinstance(answer, str) else "nothing trains exactly the same"
        return WonSquare(devices, "", 0, 0, 0, 0, 0, 0, reason)
    best = answer.candidates[0]
    batch = best.samples_per_second * best.seconds
    return WonSquare(
        devices,
        best.label,
        best.samples_per_second,
        batch / best.seconds_high,
        batch / best.seconds_low,
        best.peak_bytes,
        best.peak_low,
        best.peak_high,
    )
