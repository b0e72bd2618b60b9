"""Published results as cells of the suite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import yaml
from pydantic import BaseModel, ConfigDict

from harness.cell.cell import Cell
from harness.cell.errors import UsageError
from harness.planner.cluster.recipe import RECOMPUTE, SUITE_CELLS, Precision, Recompute

if TYPE_CHECKING:
    from harness.analysis.cell_result import CellResult

FILE = Path(__file__).with_name("published.yaml")
LINK = "nvlink,400gbit"
"""Link of the predictions; all rows are of one host."""
UNITS = {"GiB": 2**30, "GB": 10**9}


class Source(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    title: str
    url: str
    software: str
    data: str
    kernels: str
    differs: tuple[str, ...]


class PublishedRow(BaseModel):
    """A published measurement, and the cell that trains like it."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    source: str
    model: str
    variant: str = ""
    """Suffix of the workload, such as `+lora`."""
    gpus: tuple[str, ...]
    """GPUs that can run it; the first is predicted."""
    devices: int
    strategy: str
    options: dict[str, object] = {}
    precision: Precision = "bf16"
    sequence_length: int
    global_batch: int
    micro_batches: int = 1
    recompute: Literal["none", "selective", "full"]
    planned_recompute: Recompute | None = None
    compile: Literal["none", "block"] = "none"
    layout: dict[str, int]
    tokens_per_second: float
    """Published rate of each device."""
    memory: float | None = None
    memory_unit: Literal["GiB", "GB"] = "GB"
    differs: tuple[str, ...] = ()
    """Differences between the cell and the measurement, in addition to the source's."""

    @property
    def memory_bytes(self) -> float | None:
        return None if self.memory is None else self.memory * UNITS[self.memory_unit]

    @property
    def cell(self) -> Cell:
        """Raises UsageError if the suite lacks the strategy or workload."""
        from harness.seam.registry import with_defaults

        suffix, precision = SUITE_CELLS[self.precision]
        return with_defaults(
            Cell(
                strategy=self.strategy,
                options=self.options,
                workload=self.model + suffix + self.variant,
                device="cuda",
                devices=self.devices,
                sequence_length=self.sequence_length,
                global_batch=self.global_batch,
                micro_batches=self.micro_batches,
                recompute=self.recompute,
                compile=self.compile,
                precision=precision,  # type: ignore[arg-type]
                learning_rate=1e-4,
            )
        )


class PublishedRows(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    sources: dict[str, Source]
    rows: tuple[PublishedRow, ...]

    def row(self, name: str) -> PublishedRow:
        for row in self.rows:
            if row.name == name:
                return row
        names = ", ".join(row.name for row in self.rows)
        raise UsageError(f"no published row {name!r}; the rows are: {names}")


def published_rows(file: Path = FILE) -> PublishedRows:
    return PublishedRows.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Figures:
    """Tokens/s per device, and peak bytes of the fullest device. Unknown figures are None."""

    tokens_per_second: float | None
    low: float | None = None
    high: float | None = None
    memory_bytes: float | None = None


def published_figures(row: PublishedRow) -> Figures:
    return Figures(row.tokens_per_second, memory_bytes=row.memory_bytes)


def predicted_figures(row: PublishedRow) -> Figures | None:
    """Returns the prediction with its 80% interval. None for variants of a model."""
    import numpy as np

    from harness.planner.cluster.calibration import load
    from harness.planner.cluster.hardware import cluster_of
    from harness.planner.cluster.hf_config import parse_shape
    from harness.planner.cluster.prediction import predict
    from harness.planner.cluster.question import ClusterQuestion, PlannedLayout, PlannedLayouts

    if row.variant:
        return None
    question = ClusterQuestion(
        parse_shape(row.model),
        cluster_of(row.gpus[0], 8, LINK),
        row.sequence_length,
        row.global_batch,
        row.devices,
        row.precision,
    )
    recompute = RECOMPUTE.index(row.planned_recompute or row.recompute)
    layout = PlannedLayout(**row.layout, recompute=recompute)
    result = predict(question, PlannedLayouts.of([layout]), load())
    rate = question.tokens / float(result.seconds[0]) / row.devices
    return Figures(
        rate,
        rate / float(np.exp(result.upper[0])),
        rate * float(np.exp(result.half_width[0])),
        float(result.memory.reserved[0]),
    )


def measured_figures(row: PublishedRow, cell: CellResult) -> Figures:
    """Returns a measured cell's figures with 95% intervals."""
    rate = cell.throughput("tokens_per_second")
    peak = cell.memory.peak_memory_bytes
    if rate is None:
        return Figures(None, memory_bytes=peak)
    low, high = (None if end is None else end / row.devices for end in (rate.low, rate.high))
    return Figures(rate.value / row.devices, low, high, peak)


def differences(source: Source, row: PublishedRow) -> list[str]:
    from harness.host.environment import version_of

    names = ("torch", "transformers")
    here = ", ".join(f"{name} {version_of(name) or 'missing'}" for name in names)
    return [
        f"software: {source.software}; here: {here}",
        f"data: {source.data}; here: the text of Python's standard library",
        f"kernels: {source.kernels}; here: transformers' model with torch's attention",
        *source.differs,
        *row.differs,
    ]


def require_hardware(row: PublishedRow, names: Sequence[str]) -> None:
    """Raises UsageError if there are not enough of these GPUs. `names`: from NVML."""
    from harness.host.gpu_models import gpu_model

    models = [gpu_model(name) for name in names]
    usable = [model for model in models if model and model.host_name in row.gpus]
    if len(usable) < row.devices:
        raise UsageError(
            f"{row.name} needs {row.devices} x {' or '.join(row.gpus)} on this host, which has"
            f" {', '.join(names) or 'no GPU'}; --dry-run shows the cell and its prediction"
        )
