"""Options and arguments of several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import typer

from bench.run_options import BaselineCell as BaselineCell
from bench.run_options import DryRun as DryRun
from bench.run_options import Json as Json
from bench.run_options import Matrix as Matrix
from bench.run_options import Nodes as Nodes
from bench.run_options import Only as Only
from bench.run_options import Results as Results
from bench.run_options import Settings as Settings
from bench.run_options import Skip as Skip
from bench.run_options import Trials as Trials
from bench.run_options import WriteReport as WriteReport

Cell: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="CELL", help="A strategy, a pattern that matches labels or names, or a cell id."
    ),
]
Runs: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RUN",
        help="Runs, each by its id or a prefix of it, latest, or latest~1 for the run before of the"
        " same matrix; by default the newest.",
    ),
]
AllRuns: TypeAlias = Annotated[bool, typer.Option("--all", help="All runs of the folder.")]
OutFile: TypeAlias = Annotated[
    Path | None, typer.Option("--out", help="File to write; its suffix also chooses the format.")
]
OutFolder: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--out", help="Folder to write to; by default a new folder in the current directory."
    ),
]

Devices: TypeAlias = Annotated[
    int, typer.Option("--devices", help="Number of devices, one for each rank.")
]
Gpus: TypeAlias = Annotated[
    str,
    typer.Option(
        "--gpus",
        help="Number and name of the GPUs, such as '2 x rtx-4090' (see docs/hosts.md), or their"
        " memory, bandwidth and bf16 peak: '8 x 48GiB,864GB/s,181TFLOPS'.",
    ),
]
ClusterLink: TypeAlias = Annotated[
    str,
    typer.Option(
        "--link",
        help="Link inside a node (nvlink or Infinity Fabric as nvlink, pcie through host memory,"
        " pcie-p2p, or a rate such as 450gbyte), and each device's rate to other nodes, such as"
        " nvlink,400gbit; or a measured cluster: playbook-h100.",
    ),
]


def _tokens(text: str) -> int:
    from harness.planner.tools import whole

    return whole("seq", text, 10**10)


Seq: TypeAlias = Annotated[
    int,
    typer.Option(
        "--seq", parser=_tokens, metavar="INTEGER", help="Sequence length in tokens, such as 32k."
    ),
]
Batch: TypeAlias = Annotated[
    int, typer.Option("--batch", help="Global batch: samples per step, over all devices.")
]
Precision: TypeAlias = Annotated[
    Literal["fp32", "bf16", "fp16"],
    typer.Option(
        "--precision",
        help="Precision of training; bf16 and fp16 keep fp32 parameters and moments.",
    ),
]
PRECISIONS = (
    "Precision of training: fp32, bf16 (keeps fp32 parameters and moments), pure-bf16,"
    " pure-bf16-fp32-reduce or pure-bf16-fused (updates in backward)."
)
StatesPrecision: TypeAlias = Annotated[str, typer.Option("--precision", help=PRECISIONS)]
Goal: TypeAlias = Annotated[
    str,
    typer.Option("--goal", help="What to rank by: throughput, memory, cost or energy."),
]
Top: TypeAlias = Annotated[int, typer.Option("--top", min=1, help="Number of rows to show.")]
Calibration: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--calibration",
        help="File of constants fitted to other runs, or default for the suite's own.",
    ),
]
OwnRuns: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--results",
        help="Results folder of runs on one to eight of these GPUs, which anchors predicted times.",
    ),
]
WrittenMatrix: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--write-matrix",
        help="Matrix file to write, with the cells to measure to settle which is best.",
    ),
]
ExportFolder: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--export",
        help="New folder for scripts and configs of the best choice: torchrun, SLURM, Accelerate"
        " or DeepSpeed.",
    ),
]
