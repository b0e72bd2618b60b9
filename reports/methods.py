"""Measurement methods and parity tolerances, as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.analysis.cell_result import CellResult
from harness.analysis.control import Adjustment
from harness.analysis.stats import ESTIMATE_METHOD, INTERVAL_METHOD, within_a_run
from harness.analysis.utilization import FORMULA
from reports.text import deviation


@dataclass(frozen=True)
class Tolerance:
    loss: str
    update: str
    reason: str
    labels: tuple[str, ...]


def tolerances(cells: Sequence[CellResult]) -> list[Tolerance]:
    """Returns the tolerances, the tightest first. Reasons are known for cells that used more than
    the tightest."""
    grouped: dict[tuple[float, float], list[CellResult]] = {}
    for cell in cells:
        if cell.parity.loss_tolerance is not None and cell.parity.update_tolerance is not None:
            key = (cell.parity.loss_tolerance, cell.parity.update_tolerance)
            grouped.setdefault(key, []).append(cell)
    return [_tolerance(*allowed, rows) for allowed, rows in sorted(grouped.items())]


def _tolerance(loss: float, update: float, cells: Sequence[CellResult]) -> Tolerance:
    reasons = [
        cell.parity.reason
        for cell in cells
        if cell.parity.verdict == "within tolerance" and cell.parity.reason
    ]
    labels = tuple(dict.fromkeys(f"{cell.cell.label} {cell.cell.precision}" for cell in cells))
    reason = "; ".join(dict.fromkeys(reasons))
    return Tolerance(deviation(loss), deviation(update), reason, labels)


THROUGHPUT = (
    "global batch (samples, or tokens) over the step time; the step time is from when the last"
    " rank ended the step before to when the last one ends this, getting the batch included; it is"
    " counted anew after each pause, from which all ranks begin together; warm-up steps are left"
    " out"
)
STATES = (
    "distinct storages of parameters, gradients, optimizer state and the library's own copies"
    " and buffers that a rank keeps after a step, looked at outside the timed ones; shown is"
    " the fullest rank, in the trial where it keeps most"
)
SENT = (
    "payload that a rank sent over TCP in a timed step, control messages included; shown is the"
    " rank that sends most, the median of the trials"
)
EFFICIENCY = (
    "throughput over (devices x throughput on one device): 100 % is ideal. Weak scaling"
    " compares with one device at the batch that each device has"
)


def control_in_words(adjustment: Adjustment, cells: Sequence[CellResult]) -> str:
    """Describes what the control removed from a run's figures."""
    if not any(cell.speed.log_throughput for cell in cells):
        return "none: the run is of a version that had none, so its figures are as measured"
    if not adjustment.helps:
        return "none, or it did not make launches of a cell more alike: figures are as measured"
    before, after = (f"{spread * 100:.1f} %" for spread in adjustment.spreads)
    return (
        "between steps all ranks wait while a process beside each computes one sample's forward and"
        " backward of the same model on the same cores; step times are divided by the"
        f" {adjustment.control:.2f}th power of its time (mean of the ranks) and the"
        f" {adjustment.slowest:.2f}th of the slowest rank's, which all cells of the run share."
        f" Launches of a cell spread by {before} without it and by {after} with it. Work that a"
        " step leaves to its rank's threads is counted as the step's. Figures without it are in the"
        " column Unadjusted"
    )


def methods(cells: Sequence[CellResult], adjustment: Adjustment) -> list[tuple[str, str]]:
    memory = "; ".join(
        dict.fromkeys(cell.memory.memory_method for cell in cells if cell.memory.memory_method)
    )
    estimated = any(cell.speed.log_throughput for cell in cells)
    comparison = within_a_run(any(cell.speed.turns for cell in cells), estimated)
    rows = [
        ("Throughput", THROUGHPUT),
        ("Interval", ESTIMATE_METHOD if estimated else INTERVAL_METHOD),
        ("Control", control_in_words(adjustment, cells)),
        (
            "Told apart",
            f"two neighbours in a ranking are marked ≈ where no difference is seen: {comparison}",
        ),
        (
            "Memory",
            memory and f"{memory}. Each device has its own peak; shown is the largest",
        ),
        (
            "States between steps",
            STATES if any(cell.states.state_bytes is not None for cell in cells) else "",
        ),
        (
            "Bytes sent",
            SENT if any(cell.traffic.sent_bytes_per_step is not None for cell in cells) else "",
        ),
        ("Scaling efficiency", EFFICIENCY),
        ("FLOPs and MFU", FORMULA),
    ]
    return [(name, text) for name, text in rows if text]
