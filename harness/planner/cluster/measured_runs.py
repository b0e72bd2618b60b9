"""Reads tables of measured runs, and finds contradicting rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from harness.planner.cluster.layouts import PlannedLayouts
from harness.planner.cluster.model_shape import ModelShape, parse_shape
from harness.planner.fitting import Bools, Floats, Ints
from harness.spec.errors import UsageError

COLUMNS = (
    "model", "Nodes", "MBS", "GradAcc", "GBS", "DP", "PP", "TP", "ZeRO", "tok_s", "gpu_mem_gb",
)  # fmt: skip
MODELS = {name: f"playbook-{name.lower()}" for name in ("1B", "3B", "8B", "80B")}
"""Shapes of the models in the Ultra-Scale Playbook's table."""
MEMORY_UNIT = 2.0**30
"""Unit of the column gpu_mem_gb: nanotron divides by 1024**3 (its `create_table_log`)."""


@dataclass(frozen=True)
class MeasuredRuns:
    """Rows of a table of runs (arrays of shape [rows])."""

    models: tuple[str, ...]
    shapes: Mapping[str, ModelShape]
    nodes: Ints
    layouts: PlannedLayouts
    sequence_length: int
    seconds: Floats
    """Step time; NaN if the run failed."""
    memory_bytes: Floats
    """Peak memory of rank 0; NaN if the run failed."""

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def ran(self) -> Bools:
        return np.isfinite(self.seconds)

    @property
    def model_column(self) -> np.ndarray[tuple[int], np.dtype[np.str_]]:
        return np.array(self.models)

    @property
    def refuted(self) -> Bools:
        """Rows that failed although another row ran the same model and layout, so memory was not
        the cause."""
        keys = [(name, self.layouts[row]) for row, name in enumerate(self.models)]
        could = {key for key, ran in zip(keys, self.ran, strict=True) if ran}
        return np.array([key in could for key in keys]) & ~self.ran

    def take(self, rows: Bools) -> MeasuredRuns:
        return MeasuredRuns(
            tuple(self.model_column[rows].tolist()),
            self.shapes,
            self.nodes[rows],
            self.layouts.take(rows),
            self.sequence_length,
            self.seconds[rows],
            self.memory_bytes[rows],
        )

    def consistent(self) -> Bools:
        """Returns the rows that do not contradict others; failed rows never do.

        A row contradicts another that does at least as much work in less than half its time. As
        much work means a model at least as large, on no more nodes. It also means at least as many
        stages and tensor shards, and as many micro-batches that are no larger.
        """
        size = np.array([self.shapes[name].parameters for name in self.models], float)
        seconds, a = np.where(self.ran, self.seconds, np.inf), self.layouts
        result = np.ones(len(self), bool)
        for row in np.flatnonzero(self.ran):
            as_much = (
                (size >= size[row])
                & (self.nodes <= self.nodes[row])
                & (a.micro_batch <= a.micro_batch[row])
                & (a.accumulation >= a.accumulation[row])
                & (a.tensor >= a.tensor[row])
                & (a.pipeline >= a.pipeline[row])
            )
            result[row] = not np.any(as_much & (2 * seconds < seconds[row]))
        return result


def read_runs(
    file: Path, models: Mapping[str, str] = MODELS, sequence_length: int = 4096
) -> MeasuredRuns:
    """Reads a CSV file with the columns of the Ultra-Scale Playbook's table.

    Skips rows whose data axis, micro-batch and accumulation do not multiply to the global batch.
    Raises UsageError if the file cannot be read, lacks a column or names an unknown model.
    """
    try:
        table = pd.read_csv(file)
    except OSError as error:
        raise UsageError(f"cannot read runs from {str(file)!r}: {error.strerror}") from None
    except (ValueError, pd.errors.ParserError):
        raise UsageError(f"{str(file)!r} is not a table of comma-separated values") from None
    if missing := [name for name in COLUMNS if name not in table]:
        raise UsageError(f"{str(file)!r} lacks the column {missing[0]!r}; needed: {COLUMNS}")
    table = table[table.DP * table.MBS * table.GradAcc == table.GBS]
    names = tuple(table.model.astype(str))
    if unknown := sorted(set(names) - models.keys()):
        raise UsageError(
            f"{str(file)!r}: model {unknown[0]!r} has no shape; known are {', '.join(models)}"
        )

    def ints(name: str) -> Ints:
        return table[name].to_numpy(np.int64)

    one = np.ones(len(table), np.int64)
    layouts = PlannedLayouts(
        data=ints("DP"),
        pipeline=ints("PP"),
        tensor=ints("TP"),
        context=one,
        expert=one,
        zero=ints("ZeRO"),
        micro_batch=ints("MBS"),
        accumulation=ints("GradAcc"),
        recompute=0 * one,
        offload=0 * one,
        chunks=one,
    )
    tokens = table.GBS.to_numpy(float) * sequence_length
    return MeasuredRuns(
        models=names,
        shapes={name: parse_shape(models[name]) for name in set(names)},
        nodes=ints("Nodes"),
        layouts=layouts,
        sequence_length=sequence_length,
        seconds=tokens / table.tok_s.to_numpy(float),
        memory_bytes=table.gpu_mem_gb.to_numpy(float) * MEMORY_UNIT,
    )
