from __future__ import annotations

import gzip
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from bench.cli import options as opt

if TYPE_CHECKING:
    from harness.analysis.summary import GpuTime
    from harness.cell.cell import Cell
    from harness.record.profile_record import ProfileRecord


def profile(
    which: opt.Cell,
    matrix: opt.Matrix = "full",
    settings: opt.Settings = None,
    results: opt.Results = Path("results"),
    out: opt.OutFolder = None,
    json_output: opt.Json = False,
) -> None:
    """Show where a cell's time goes, and write traces.

    Writes a trace of each rank for Perfetto. CELL may be in the matrix or the results folder,
    or a strategy with options, such as ddp:static_graph=true.

    Example: [bold]python -m bench profile ddp:static_graph=true --set devices=2[/bold]
    """
    from bench.cli.export import slug
    from bench.select import of_several, plainest

    cells = find_profiled(which, matrix, settings or [], results)
    cell = plainest(cells)
    _require_runnable(cell)
    folder = out or Path("traces") / slug(f"{cell.label} {cell.workload_name} x{cell.devices}")
    record, files = _traced(cell, folder)
    gpu = gpu_time_of(cell, record)
    if json_output:
        document = asdict(record)
        for name in ("run_id", "attempt", "started_at"):
            del document[name]
        for name in ("collectives", "unseen_buffers"):
            if document.get(name):
                document[name] = json.loads(document[name])
        document["gpu_seconds"] = gpu and dict(gpu.seconds)
        document |= {"folder": str(folder), "traces": [str(file) for file in files]}
        print(json.dumps(document))
    else:
        if several := of_several(which, len(cells)):
            print(f"profiled {several}")
        _tell(cell, record, files, gpu)
    if record.status != "ok":
        raise typer.Exit(1)


def _require_runnable(cell: Cell) -> None:
    from harness.cell.errors import Refused, Unavailable, UsageError
    from harness.seam.registry import validate
    from harness.workloads import make_workload

    try:
        validate(cell, make_workload(cell.workload))
    except (Refused, Unavailable) as reason:
        raise UsageError(f"{cell.name} cannot run here: {reason}") from None


def _traced(cell: Cell, folder: Path) -> tuple[ProfileRecord, list[Path]]:
    """Returns a profiled cell's record and traces, which replace the folder's on success."""
    from harness.cell.errors import UsageError
    from harness.launch.launcher import Launcher
    from harness.links.emulated import over_links
    from harness.run.prepared import packages
    from harness.run.profile import profile_cell

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"traces cannot be written to {str(folder)!r}: {error.strerror}") from None
    with tempfile.TemporaryDirectory(dir=folder) as fresh:
        with over_links([cell], Launcher) as launcher:
            record = profile_cell(
                launcher(packages([cell])), "", cell, traces=str(Path(fresh).resolve())
            )
        files = replace_traces(name_ranks(Path(fresh)), folder) if record.status == "ok" else []
    return record, files


def find_profiled(word: str, matrix: str, settings: list[str], results: Path) -> list[Cell]:
    """Returns the recorded cell of this id or name, else the matrix's cells that match."""
    from bench.expand import cells_of
    from bench.select import (
        find_cells,
        planned_cell,
        require_unchanged,
        split_options,
        with_options,
    )
    from harness.record.store import Store

    store = Store(results)
    if recorded := planned_cell(store, word, matrix):
        require_unchanged(recorded, settings)
        return [recorded]
    cells = cells_of(matrix, settings)
    name, options = split_options(word)
    meant = find_cells(cells, name, matrix, store, settings)
    return meant if options is None else [with_options(cell, options) for cell in meant]


def replace_traces(files: list[Path], folder: Path) -> list[Path]:
    for old in (*folder.glob("rank*.json.gz"), folder / "all.json.gz"):
        old.unlink(missing_ok=True)
    return [file.replace(folder / file.name) for file in files]


def name_ranks(folder: Path) -> list[Path]:
    """Labels processes with their rank; also merges several traces into all.json.gz."""
    from harness.cell.errors import UsageError

    def rank_of(file: Path) -> int:
        return int(file.name.removeprefix("rank").partition(".")[0])

    traces = {}
    for file in sorted(folder.glob("rank*.json.gz"), key=rank_of):
        rank = rank_of(file)
        names = {
            "process_name": {"name": f"rank {rank}"},
            "process_sort_index": {"sort_index": rank},
        }
        trace = json.loads(gzip.decompress(file.read_bytes()))
        steps = [e["pid"] for e in trace["traceEvents"] if e.get("name") == "bench:step"]
        if not steps:
            raise UsageError(
                f"the trace of rank {rank} has no event 'bench:step', which marks the profiled"
                " step: end other profilers of this process, and profile the cell again"
            )
        for event in trace["traceEvents"]:
            name = event.get("name")
            if event.get("ph") == "M" and name in names and event.get("pid") == steps[0]:
                event["args"] = names[name]
        file.write_bytes(gzip.compress(json.dumps(trace).encode(), 5))
        traces[file] = trace
    if len(traces) < 2:
        return list(traces)
    together = folder / "all.json.gz"
    first = next(iter(traces.values()))
    whole = {
        **first,
        "traceEvents": [event for trace in traces.values() for event in trace["traceEvents"]],
    }
    together.write_bytes(gzip.compress(json.dumps(whole).encode(), 5))
    return [*traces, together]


def gpu_time_of(cell: Cell, record: ProfileRecord) -> GpuTime | None:
    """Returns how the GPU spent the profiled step; None for CPU cells and failures.

    Measures peak rates first, in about 8 s.
    """
    from harness.analysis.summary import gpu_time
    from harness.measure.hardware_benchmark import measure_apart
    from harness.run.metrics import peaks_of
    from harness.workloads import make_workload
    from harness.workloads.counts import model_facts

    if cell.device != "cuda" or record.status != "ok":
        return None
    workload = make_workload(cell.workload)
    flops = model_facts(workload, cell.sequence_length).flops_per_sample * cell.global_batch
    rate = peaks_of(cell, workload, measure_apart().as_json).matmul
    return gpu_time(record, flops / cell.devices, rate)


def _tell(cell: Cell, record: ProfileRecord, files: list[Path], gpu: GpuTime | None) -> None:
    from harness.record.profile_record import COMPONENTS

    print(cell.name)
    if record.status != "ok":
        print(f"  {record.status}: {record.reason}")
        return
    assert record.profiled_step_seconds is not None
    assert record.plain_step_seconds is not None
    print(
        f"  step {record.profiled_step_seconds * 1e3:.1f} ms, without the profiler"
        f" {record.plain_step_seconds * 1e3:.1f} ms"
    )
    means = {
        name: sum(seconds) / len(seconds)
        for name in COMPONENTS
        if (seconds := getattr(record, f"{name}_seconds"))
    }
    longest = sorted(
        ((name, seconds) for name, seconds in means.items() if seconds >= 5e-5),
        key=lambda pair: -pair[1],
    )
    print(
        "  mean of the ranks: "
        + ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in longest)
    )
    if gpu:
        print(f"  GPU: {gpu.sentence}")
    if record.straggler is not None and record.straggler_excess is not None:
        print(
            f"  rank {record.straggler} is slower than the others by {record.straggler_excess:.0%}"
        )
    for file in files:
        print(f"  {file}")
    print(
        "open one at https://ui.perfetto.dev (Open trace file; nothing is uploaded), or in"
        " chrome://tracing"
    )
