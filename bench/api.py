"""The Python interface: commands as functions."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from bench.run_options import CommandOptions, RunOptions, taking
from harness.cell.errors import UsageError
from harness.record.store import Results, Store

if TYPE_CHECKING:
    import pandas as pd

    from harness.analysis.answer import Answer
    from harness.analysis.ranking import Choice
    from harness.planner.cluster.calibration import ClusterCalibration
    from harness.planner.cluster.cluster_plan import ClusterPlan
    from harness.planner.cluster.hardware import Cluster
    from harness.planner.cluster.question import PlannedLayout
    from harness.planner.cluster.recipe import Loss
    from harness.planner.fits import FitAnswer, FitQuestion
    from harness.planner.follow_up import StrategyOptions
    from harness.run.runner import ProgressListener

__all__ = ["RecordedRuns", "fits", "load", "plan", "run"]

TRIED_MATRICES = ("full", "ddp_options", "fsdp2_options", "variants")
"""Matrices that together have every strategy and every variant."""
USUAL = {
    "method": "lora",
    "sequence": "2048",
    "micro_batch": "1",
    "precision": "bf16",
    "rank": "16",
}
"""Fields of a fine-tuning that nobody stated."""
MAX_PRICE = 1e9
"""Maximum price of a device-hour, in any currency."""


@dataclass(frozen=True)
class RecordedRuns(Results):
    """Tables of one or more runs, and results computed from them."""

    baseline: Choice | None = None
    """Selects the baseline cell. By default DDP, or the single process if a run has no DDP."""

    @functools.cached_property
    def cells(self) -> pd.DataFrame:
        """One row per run and cell: ranked cells first, fastest first."""
        from harness.analysis.summary import cells

        return cells(self.trials, self.baseline)

    @functools.cached_property
    def answer(self) -> Answer | None:
        """Advice from the newest run. None if there is nothing to choose."""
        from reports.run_report import only, ran

        return ran(only(self, [self.runs["run_id"].iloc[-1]]), self.baseline).advised

    def report(self, path: str | Path) -> Path:
        """Writes a report of these runs and returns its path; the suffix chooses the format: html,
        md, csv or json.

        Raises UsageError if the file cannot be written.
        """
        from reports import write_report

        return write_report(self, Path(path), baseline=self.baseline)


def load(
    folder: str | Path = "results", runs: Sequence[str] | None = None, *, baseline: str = ""
) -> RecordedRuns:
    """Returns recorded runs of a results folder, by default all.

    `runs`: ids or their prefixes, `latest` or `latest~1`. `baseline`: strategy, id or pattern of
    the cell to compare with. Raises UsageError for an unknown run or baseline.
    """
    from bench.select import baseline_choice, find_run
    from harness.cell.cell import Cell

    store = Store(folder)
    tables = store.load(None if runs is None else [find_run(store, run) for run in runs])
    recorded = [Cell.model_validate_json(text) for text in tables.trials["cell"].unique()]
    return RecordedRuns(**vars(tables), baseline=baseline_choice(baseline, recorded))


@dataclass(frozen=True, kw_only=True)
class _PythonOptions(RunOptions):
    listener: ProgressListener | None = None


@taking(_PythonOptions)
def run(options: _PythonOptions) -> RecordedRuns:
    """Trains, verifies and records cells, or a matrix; returns the recorded results.

    `cells`: cells, or axes as in a matrix, where a list stands for several cells. `settings`: axes
    set in all cells. `run_id`: name of the run; an existing one is continued. `listener`: receives
    progress. Other parameters are options of `bench run`.

    Raises UsageError for a mistake. After KeyboardInterrupt, `run_id` continues the run.
    """
    _check(bool(options.cells), bool(options.matrix or options.scripts), options.trials)
    _check_times(
        time_budget_seconds=options.time_budget_seconds, timed_seconds=options.timed_seconds
    )
    from bench.execution import conclude, execute, prepare
    from harness.run.runner import ProgressListener

    given = dict(vars(options))
    listener: ProgressListener = given.pop("listener") or ProgressListener()
    of_command = CommandOptions(**given)
    prepared = prepare(of_command)
    ended = execute(
        prepared,
        of_command,
        lambda plan, cells: contextlib.nullcontext(listener),
        listener.preparing,
    )
    conclude(prepared.store, ended, prepared.baseline)
    if not ended.finished:
        raise KeyboardInterrupt
    tables = prepared.store.load([ended.plan.run_id])
    return RecordedRuns(**vars(tables), baseline=prepared.baseline)


def _check(cells: bool, matrix: bool, trials: int | None) -> None:
    from harness.host.packages import TRAINING, missing

    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "bench.run must be called from the main thread, because its ranks end with the"
            " calling thread"
        )
    if sentence := missing(TRAINING):
        raise UsageError(sentence)
    if cells == matrix:
        raise UsageError("bench.run needs either cells, or a matrix or scripts")
    if trials is not None and (not isinstance(trials, int) or trials < 1):
        raise UsageError(f"trials {trials!r}: give a whole number of at least 1")


def _check_times(**seconds: float | None) -> None:
    for name, value in seconds.items():
        if value is not None and not 0 <= value < math.inf:
            raise UsageError(f"{name} {value!r}: give seconds, 0 or more")


def plan(
    model: str,
    *,
    gpus: str = "8 x h100-80gb",
    gpus_per_node: int = 8,
    link: str = "nvlink,400gbit",
    sequence_length: int = 4096,
    batch: int = 256,
    precision: str = "bf16",
    goal: str = "throughput",
    price: float | None = None,
    top: int = 10,
    calibration: str | Path | None = None,
    results: str | Path | None = None,
    host_memory_bytes: int | None = None,
    layouts: Sequence[PlannedLayout] | None = None,
    rehearse: int = 0,
    like: str | None = None,
    loss: str | None = None,
) -> ClusterPlan:
    """Predicts the best layouts of a training on GPUs such as `64 x h100-80gb`; see `bench plan`.

    `layouts`: layouts to consider, by default all. `like`: the program that trains. `loss`: that
    of FSDP2's layouts, by default the program's. Raises UsageError.
    """
    from harness.host.gpu_models import parse_gpus
    from harness.planner.cluster.cluster_plan import plan as predicted
    from harness.planner.cluster.hardware import cluster_of
    from harness.planner.cluster.hf_config import parse_shape
    from harness.planner.cluster.question import ClusterQuestion, PlannedLayouts
    from harness.planner.cluster.recipe import PROGRAMS, named, precision_named
    from harness.planner.tools import parsed

    if price is not None and not 0 < price <= MAX_PRICE:
        raise UsageError(f"price {price:g}: give a price above 0 and at most {MAX_PRICE:g}")
    count, gpu = parse_gpus(gpus)
    cluster = cluster_of(gpu.host_name, gpus_per_node, link, host_memory_bytes)
    if results is not None:
        from harness.planner.own_runs import measured_cluster

        cluster = measured_cluster(cluster, Path(results))
    recipe = precision_named(precision)
    program = named("program", like, PROGRAMS) if like else ""
    kind = cast("Loss | None", loss and parsed("loss", loss))
    question = ClusterQuestion(
        parse_shape(model), cluster, sequence_length, batch, count, recipe, program, kind
    )
    constants = plan_constants(calibration, results, cluster)
    chosen = None if layouts is None else PlannedLayouts.of(layouts)
    answer = predicted(question, constants, goal, top, price, chosen)
    return _rehearsed(answer, model, rehearse) if rehearse else answer


def plan_constants(
    calibration: str | Path | None, results: str | Path | None, cluster: Cluster
) -> ClusterCalibration:
    """Returns the planner's constants, anchored with a results folder if one is given."""
    from harness.planner.cluster.calibration import calibration_file
    from harness.planner.cluster.calibration import load as load_constants

    constants = load_constants(calibration_file(calibration))
    if results is None:
        return constants
    from harness.planner.own_runs import anchored

    return anchored(constants, Path(results), cluster)


def _rehearsed(answer: ClusterPlan, model: str, count: int) -> ClusterPlan:
    from harness.planner.follow_up import rehearsed, workload_of

    workload_of(model)
    tried = tried_options()
    first = [rehearsed(answer.question, model, row, tried) for row in answer.candidates[:count]]
    return dataclasses.replace(answer, candidates=(*first, *answer.candidates[count:]))


def tried_options() -> list[StrategyOptions]:
    """Returns the strategies of TRIED_MATRICES, with their options."""
    from bench.matrix import read_matrix

    tried: list[StrategyOptions] = []
    for axes in (axes for name in TRIED_MATRICES for axes in read_matrix(name).cells):
        names, options = axes["strategy"], axes.get("options", {})
        for name in names if isinstance(names, list) else [names]:
            for values in options if isinstance(options, list) else [options]:
                tried.append((name, dict(values)))
    return tried


def fits(
    model: str | None,
    gpus: str,
    *,
    link: str | None = None,
    results: str | Path | None = None,
    like: str | None = None,
    config: str | Path | None = None,
    **fields: object,
) -> FitAnswer:
    """Predicts whether fine-tuning fits GPUs such as `2 x rtx-4090`, and how fast it is; see
    `bench fits`.

    `fields`: what its options set, such as `method`, `sequence_length`, `micro_batch`, `precision`
    and `lora_rank`. Raises UsageError.
    """
    from harness.planner.fits import answer

    fields = {"model": model, **fields}
    return answer(
        fit_question(gpus, link=link, results=results, like=like, config=config, fields=fields)
    )


def fit_question(
    gpus: str,
    *,
    fields: Mapping[str, object],
    link: str | None = None,
    results: str | Path | None = None,
    like: str | None = None,
    config: str | Path | None = None,
) -> FitQuestion:
    """Returns the question of `bench fits`. Fields that are not None go before a tool's file, and
    the file before the tool's defaults. Raises UsageError."""
    from harness.host.gpu_models import parse_gpus
    from harness.planner.cluster.hf_config import parse_shape
    from harness.planner.cluster.recipe import UNTIED
    from harness.planner.fits import PER_NODE, FitQuestion, link_bytes_per_second
    from harness.planner.tools import config_fields, field_named, parsed, tool_fields

    stated = config_fields(Path(config)) if config else {}
    stated |= {field_named(name): str(value) for name, value in fields.items() if value is not None}
    method = parsed("method", stated.get("method", USUAL["method"]))
    of_tool = tool_fields(like, str(method)) if like else {}
    values = {name: parsed(name, text) for name, text in {**USUAL, **of_tool, **stated}.items()}
    if "model" not in values:
        raise UsageError("no model is given; name one, such as llama-8b")
    if values.get("base", "bf16") != "bf16" and values["method"] in ("lora", "dora"):
        values["method"] = f"q{values['method']}"
    if values.get("offload"):
        values.setdefault("sharding", "full")
    count, gpu = parse_gpus(gpus)
    if count > PER_NODE and count % PER_NODE:
        raise UsageError(f"gpus {gpus!r}: more than {PER_NODE} must fill nodes of {PER_NODE}")
    bandwidth = link_bytes_per_second(gpu, link)
    shape, asked = parse_shape(str(values.pop("model"))), {n: values.pop(n) for n in USUAL}
    if values.get("library") in UNTIED:
        shape = dataclasses.replace(shape, tied=False)
    question = FitQuestion(
        shape,
        gpu,
        count,
        link_bytes_per_second=bandwidth,
        fixed=values,
        **asked,  # type: ignore[arg-type]
    )
    if results is None:
        return question
    from harness.planner.own_runs import with_own_runs

    return with_own_runs(question, Path(results))
