"""Exported scripts against the suite's own cells: throughput and losses, in alternating pairs.

`.venv/bin/python -m docs.studies.exported_scripts FILE [PAIRS [LABEL...]]` runs 8 pairs of each
of the ten fastest cells of the kept run and of the fastest of each library, or only of cells with
these labels, and appends a line for each pair to FILE. Cells in FILE are not run again. Prints a
table: the script's throughput over the suite's, the geometric mean of the pairs, with its 95%
interval (Student's t), and the largest loss deviation.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from scipy.stats import t

from bench.api import TRIED_MATRICES
from bench.expand import cells_of
from harness.analysis.consistency import loss_deviations, mean_losses
from harness.analysis.stats import over_cycles, percentile
from harness.cell.cell import Cell
from harness.export import export_files, first_target, write_files
from harness.launch.launcher import Launcher
from harness.record.store import load
from harness.run.metrics import timed_seconds
from harness.run.prepared import packages
from harness.seam.registry import make_strategy, own_command
from harness.workloads import make_workload, prepare_data
from reports.run_report import ran

ROOT = Path(__file__).parents[2]
FASTEST, PAIRS, TIMED_STEPS = 10, 8, 48
LIBRARIES = ("ddp", "horovod", "accelerate", "trainer", "deepspeed", "fairscale_oss", "diloco")
"""A strategy of each library, whose fastest cell is taken."""
CONFIDENCE = 0.95


def studied() -> list[Cell]:
    """Returns the fastest cells of the kept run's headline, and the fastest of each library, as
    the matrices have them now."""
    report = ran(load(ROOT / "results" / "reference"))
    assert report.leading is not None
    rows = report.leading.rows
    first = [next(row for row in rows if row.cell.strategy == name) for name in LIBRARIES]
    now = {cell.name: cell for matrix in TRIED_MATRICES for cell in cells_of(matrix, [])}
    chosen = {}
    for cell in (row.cell for row in [*rows[:FASTEST], *first]):
        named = cell.model_copy(update={"options": cell.options | cell.set_unnamed})
        chosen[named.name] = now[named.name]
    return [*chosen.values()]


def throughput(cell: Cell, seconds: list[float]) -> float:
    cycle = make_strategy(cell).cycle
    steps = range(cell.warmup_steps, cell.warmup_steps + len(seconds))
    return cell.global_batch / percentile(over_cycles(seconds, steps, cycle), 0.5)


def by_suite(cell: Cell) -> tuple[float, list[float]]:
    """Returns samples per second and the losses of all steps."""
    strategy, workload = make_strategy(cell), make_workload(cell.workload)
    outcome = Launcher(packages([cell])).run(
        cell,
        prepare_data(cell.data, workload, cell.sequence_length),
        strategy.layout(cell.devices).processes,
        max_restarts=strategy.capabilities.max_restarts,
        command=own_command(strategy, cell),
    )
    assert outcome.status == "ok", outcome.reason
    ranks = [rank.steps for rank in outcome.trained]
    losses = mean_losses([[step.loss for step in steps] for steps in ranks])
    return throughput(cell, timed_seconds(ranks)), [x for x in losses if x is not None]


def by_script(cell: Cell) -> tuple[float, list[float]]:
    files, note = export_files(cell, first_target(cell))
    assert not note, note
    with tempfile.TemporaryDirectory() as folder:
        write_files(files, Path(folder) / "cell")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        command = ["bash", str(Path(folder) / "cell" / "run.sh")]
        variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PATH": path}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    printed = (
        line[line.index('{"step"') :] for line in done.stdout.splitlines() if '"step"' in line
    )
    rows = [json.JSONDecoder().raw_decode(line)[0] for line in printed]
    assert len(rows) == cell.total_steps, done.stderr[-2000:]
    seconds = [row["seconds"] for row in rows[cell.warmup_steps :]]
    return throughput(cell, seconds), [row["loss"] for row in rows]


def run(cell: Cell, pairs: int, file: Path) -> None:
    longer = cell.model_copy(update={"timed_steps": max(TIMED_STEPS, cell.timed_steps)})
    for pair in range(pairs):
        measured = {}
        for kind in (by_suite, by_script) if pair % 2 else (by_script, by_suite):
            measured[kind.__name__] = kind(longer)
        row = {"cell": cell.label, "target": first_target(cell), "pair": pair, **measured}
        with file.open("a") as lines:
            lines.write(json.dumps(row) + "\n")


def table_row(label: str, rows: list[dict[str, list[list[float]]]]) -> str:
    logs = [math.log(row["by_script"][0] / row["by_suite"][0]) for row in rows]
    mean, width = statistics.fmean(logs), math.inf
    if len(logs) > 1:
        error = statistics.stdev(logs) / math.sqrt(len(logs))
        width = error * t.ppf((1 + CONFIDENCE) / 2, len(logs) - 1)
    low, high = math.exp(mean - width), math.exp(mean + width)
    off = max(max(loss_deviations(row["by_script"][1], row["by_suite"][1])) for row in rows)
    ratio = f"{math.exp(mean):.3f} ({low:.3f} to {high:.3f})"
    return f"| `{label}` | {rows[0]['target']} | {ratio} | {len(rows)} | {off:.1e} |"


def main() -> None:
    file, pairs, labels = (
        Path(sys.argv[1]),
        int(sys.argv[2] if sys.argv[2:] else PAIRS),
        sys.argv[3:],
    )
    cells = [cell for cell in studied() if not labels or cell.label in labels]
    for cell in cells:
        if not file.exists() or f'"cell": {json.dumps(cell.label)},' not in file.read_text():
            run(cell, pairs, file)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    print("| cell | started by | script over suite (95% interval) | pairs | loss deviation |")
    print("|---|---|---|---|---|")
    for label in dict.fromkeys(row["cell"] for row in rows):
        print(table_row(label, [row for row in rows if row["cell"] == label]))


if __name__ == "__main__":
    main()
