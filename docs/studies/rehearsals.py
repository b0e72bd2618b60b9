"""Compares rehearsed with measured memory, for each strategy and set of options of a matrix.

`.venv/bin/python -m docs.studies.rehearsals full maxsize` trains each once on CPU ranks, on a small
model, with torch's memory tracker in every rank. It rehearses the same ranks, and prints a table in
Markdown: the fullest rank's peaks, and the largest error of a rank.
"""

from __future__ import annotations

import json
import subprocess
import sys

from bench.expand import expand
from bench.matrix import Host, SearchMatrix, read_as, read_matrix
from harness.cell.cell import Cell
from harness.cell.errors import Refused, Unavailable, UsageError
from harness.launch.launcher import Launcher
from harness.run.prepared import packages
from harness.run.profile import profile_cell
from harness.seam.registry import make_strategy, validate
from harness.workloads import make_workload

SIZES = {"sequence_length": 64, "global_batch": 8}
WORKLOADS = ("llama-256x4", "mixtral-micro", "resnet-micro")
"""Each cell gets the first of these that its strategy can train."""


def cells_of(matrix: str) -> dict[str, Cell]:
    """Returns one cell for each strategy and set of options, in fp32 if it runs in fp32."""
    host = Host("cpu", 2, 24 * 2**30, elsewhere=True)
    searched = matrix == "maxsize"
    read = read_as("bench/maxsize.yaml", SearchMatrix) if searched else read_matrix(matrix)
    sizes = dict.fromkeys(("main", "wide"), WORKLOADS[0])
    expanded = expand(read.model_copy(update={"workloads": sizes}) if searched else read, host)
    cells: dict[str, Cell] = {}
    for cell in [*expanded.cells, *(left.cell for left in expanded.left_out)]:
        staged = make_strategy(cell).capabilities.stages
        plain = {"micro_batches": cell.micro_batches if staged else 1, "device": "cpu"}
        plain |= {"recompute": "none", "checkpoint": "none", "nodes": 1}
        plain |= {"compile": "none", "links": "", "regime": "strong", "time_limit_seconds": 180}
        key = f"{cell.strategy} {json.dumps(cell.options, sort_keys=True)}"
        if key not in cells or cells[key].devices < cell.devices:
            small = cell.model_copy(update={**SIZES, **plain})
            made = [
                small.model_copy(update={"workload": name, "precision": precision})
                for name in WORKLOADS
                for precision in ("fp32", cell.precision)
            ]
            cells[key] = next(filter(can_run, made), made[0])
    return {cell.label: cell for cell in cells.values()}


def can_run(cell: Cell) -> bool:
    try:
        validate(cell, make_workload(cell.workload))
    except (Refused, Unavailable, UsageError):
        return False
    return True


def rehearsed(cell: Cell) -> tuple[dict[int, int], str]:
    """Returns peaks in bytes by rank, as `bench rehearse` prints them, or why they are unknown."""
    options = ",".join(f"{name}={json.dumps(value)}" for name, value in cell.options.items())
    asked = {"model": cell.workload, "devices": cell.devices, "batch": cell.global_batch}
    asked |= {"seq": cell.sequence_length, "micro-batches": cell.micro_batches}
    asked |= {"precision": cell.precision}
    command = [sys.executable, "-m", "bench", "rehearse", f"{cell.strategy}:{options}".strip(":")]
    command += [f"--{name}={value}" for name, value in asked.items()]
    ended = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    if ended.returncode:
        return {}, ended.stderr.strip().splitlines()[-1]
    answer = json.loads(ended.stdout)[0]
    return {rank["rank"]: rank["peak_bytes"] for rank in answer["ranks"]}, ""


def row(launcher: Launcher, cell: Cell) -> str:
    """Returns a line of the table."""
    peaks, why = rehearsed(cell)
    try:
        record = profile_cell(launcher, "run", cell)
        measured = dict(enumerate(record.peak_tracked_bytes))
        why += record.reason or record.memory_reason
    except (Refused, Unavailable, UsageError) as reason:
        measured, why = {}, f"{why} {reason}"
    start = f"| `{cell.label}` | {cell.devices} |"
    fullest = [f"{max(each.values()) / 2**20:.1f}" if each else "" for each in (peaks, measured)]
    errors = [peaks[rank] / measured[rank] - 1 for rank in peaks.keys() & measured.keys()]
    error = f"{100 * max(errors, key=abs):+.2f}%" if errors else ""
    return " ".join([start, *(f"{each} |" for each in [*fullest, error, why.replace("|", "/")])])


def main() -> None:
    cells = {label: cell for matrix in sys.argv[1:] for label, cell in cells_of(matrix).items()}
    launcher = Launcher(packages(list(cells.values())))
    print("| strategy | ranks | rehearsed MiB | measured MiB | largest error | why not |")
    print("|---|---|---|---|---|---|")
    for cell in cells.values():
        print(row(launcher, cell), flush=True)


if __name__ == "__main__":
    main()
