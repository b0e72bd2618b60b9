"""Reads trainings that a user measured on GPUs, and anchors predictions with them."""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

from harness.cell.cell import Cell
from harness.cell.errors import Refused, Unavailable, UsageError
from harness.host.gpu_models import GpuModel, gpu_model, gpu_named
from harness.planner.cluster.anchor import Anchor, anchor_of
from harness.planner.cluster.calibration import ClusterCalibration
from harness.planner.cluster.device_rates import USUAL_SHARE, best_products
from harness.planner.cluster.hardware import Cluster
from harness.planner.cluster.hf_config import from_entries, named_shapes, parse_shape
from harness.planner.cluster.model_shape import ModelShape
from harness.planner.cluster.prediction import predict
from harness.planner.cluster.question import ClusterQuestion, PlannedLayout, PlannedLayouts
from harness.planner.cluster.recipe import RECOMPUTE, SUITE_CELLS, Adapter, Precision, Recipe
from harness.planner.fits import MEMORY_SHARE, FitQuestion, launch_bound, tokens_per_second
from harness.record.store import Store
from harness.record.trial import SpeedMeasurement
from harness.seam.registry import make_strategy, strategies
from harness.workloads import make_workload

TABLE = "finetune.csv"
"""File of a results folder with fine-tunings that other scripts measured on one GPU."""
COLUMNS = (
    *("model", "parameters", "method", "weights"),
    *("sequence_length", "micro_batch", "recompute", "step_seconds"),
)
Training = tuple[ModelShape, Recipe, float]
"""A measured training, with the median seconds of a step."""


def measured_trainings(folder: Path, gpu: GpuModel) -> list[Training]:
    """Returns the trainings that a folder's table, or else its runs, measured on this GPU.

    Raises UsageError if there are none.
    """
    file = folder / TABLE
    found = list(_of_table(file, gpu) if file.is_file() else _of_runs(folder, gpu))
    if not found:
        raise UsageError(
            f"{str(folder)!r} has no training on {gpu.host_name} that can anchor predictions;"
            " measure some models on it that are large enough to keep it busy"
        )
    return found


def _of_table(file: Path, gpu: GpuModel) -> Iterator[Training]:
    with file.open(encoding="utf-8", newline="") as opened:
        rows = list(csv.DictReader(opened))
    for row in rows:
        if missing := [name for name in COLUMNS if not row.get(name)]:
            raise UsageError(f"{str(file)!r} lacks {missing[0]!r} in a row; give it for each run")
        # If a table has no column for the GPU, its folder is named after the GPU.
        if gpu_named(row.get("gpu") or file.resolve().parent.name) != gpu:
            continue
        try:
            yield _of_row(row)
        except ValueError as error:
            raise UsageError(f"{str(file)!r}: {error}") from None


def _of_row(row: dict[str, str]) -> Training:
    size = int(row["parameters"])
    # Other scripts have other names for the same models.
    same_size = [shape for shape in named_shapes().values() if shape.parameters == size]
    shape = same_size[0] if same_size else parse_shape(row["model"])
    recipe = Recipe(
        precision="bf16" if "autocast" in row["weights"] else "pure-bf16",
        adapter=None if row["method"] == "full" else Adapter(dora="dora" in row["method"]),
        base="nf4-double" if row["method"].startswith("q") else "bf16",
        recompute="full" if row["recompute"] == "true" else "none",
        sequence=int(row["sequence_length"]),
        micro_batch=int(row["micro_batch"]),
    )
    return shape, recipe, float(row["step_seconds"])


def _of_runs(folder: Path, gpu: GpuModel) -> Iterator[Training]:
    """Yields cells that ran on this GPU, except stand-ins and compiled models. Also leaves out
    cells whose steps wait for the processor's launches: they say nothing about the GPU."""
    tables = Store(folder).load(steps=False)
    runs = zip(tables.runs.run_id, tables.runs.gpus, strict=True)
    here = [run for run, gpus in runs if {*map(gpu_model, gpus)} == {gpu}]
    trials = tables.trials
    ran = trials.status.eq("ok") & trials.device.eq("cuda") & trials.compile.eq("none")
    trials = trials[ran & trials.run_id.isin(here) & trials.stand_in.isna()]
    for text, seconds in trials.groupby("cell").step_seconds_p50.median().items():
        cell = Cell.model_validate_json(str(text))
        found = _training_of(cell)
        if found and not launch_bound(*found, gpu):
            yield *found, seconds


def _training_of(cell: Cell) -> tuple[ModelShape, Recipe] | None:
    """Returns a cell's shape and recipe; None if the planner cannot describe it. A folder may be
    somebody else's, so no code that it names is read."""
    name, *variants = cell.workload.split("+")
    if cell.strategy not in strategies() or ":" in name or cell.recompute not in RECOMPUTE:
        return None
    offloads = [value for key, value in cell.options.items() if "offload" in key]
    if any(value not in (False, "none") for value in offloads):
        return None
    if cell.loss != "plain" or cell.activations != "device":
        return None
    adapted = {"lora", "dora"} & {*variants}
    variant = "+bf16" if "bf16" in variants else ""
    precisions: dict[tuple[str, str], Precision] = {of: name for name, of in SUITE_CELLS.items()}
    precision = precisions.get((variant, cell.precision))
    if {*variants} - {"bf16", "lora", "dora", "nf4"} or (precision is None and not adapted):
        return None
    try:
        strategy = make_strategy(cell)
        layout = strategy.layout(cell.devices)
        config = getattr(make_workload(name), "hf_config", None)
        shape = from_entries(config().to_dict(), name) if config else None
    except (Refused, Unavailable, UsageError):
        return None
    zero = strategy.zero_stage if layout.data > 1 else 0
    if shape is None or layout.pipeline > 1 or layout.sequence > 1 or zero == 1:
        return None
    recipe = Recipe(
        precision=precision or "pure-bf16",
        adapter=Adapter(dora="dora" in adapted) if adapted else None,
        base="nf4" if "nf4" in variants else "bf16",
        gpus=layout.data,
        sharding="grad" if zero == 2 else "full" if zero else "none",
        recompute=cell.recompute,
        sequence=cell.sequence_length,
        micro_batch=max(1, cell.global_batch // layout.shares // cell.micro_batches),
        accumulation=cell.micro_batches,
        tensor=layout.tensor,
    )
    return shape, recipe


def with_own_runs(question: FitQuestion, folder: Path) -> FitQuestion:
    """Returns the question with its GPU's measured rates, and anchored with a folder's trainings.
    Raises UsageError if there are neither."""
    gpu = question.gpu
    if rates := _measured_rates(folder, gpu):
        flops, bandwidth = rates
        faster = dataclasses.replace(
            gpu, bf16_flops_per_second=flops, memory_bytes_per_second=bandwidth
        )
        question = dataclasses.replace(question, gpu=faster, measured=str(folder))
    try:
        trainings = measured_trainings(folder, gpu)
        errors = [
            fit_error(question, *training) for training in trainings if training[1].tensor == 1
        ]
        return dataclasses.replace(question, anchor=_anchor(errors, folder))
    except UsageError:
        if question.measured:
            return question
        raise


def measured_cluster(cluster: Cluster, folder: Path) -> Cluster:
    """Returns the cluster with its device's measured rates, if a folder has any."""
    rates = _measured_rates(folder, gpu_named(cluster.device))
    if rates is None:
        return cluster
    flops, bandwidth = rates
    return dataclasses.replace(
        cluster,
        flops_per_second=flops,
        reached_flops_per_second=USUAL_SHARE * flops,
        memory_bytes_per_second=bandwidth,
        measured=str(folder),
    )


def _measured_rates(folder: Path, gpu: GpuModel) -> tuple[float, float] | None:
    """Returns the peak FLOP/s and memory bytes per second that fit the products and copies that the
    newest run on such a GPU timed. None without any, or if hardware.yaml has the GPU."""
    if gpu.host_name in best_products():
        return None
    runs, found = Store(folder).load(steps=False).runs, None
    for gpus, text in zip(runs.gpus, runs.device_speed, strict=True):
        measured = SpeedMeasurement.read(text)
        if not measured or not measured.speed or {*map(gpu_model, gpus)} != {gpu}:
            continue
        if product := measured.speed.matmul_flops_per_second.get("bf16"):
            found = product / USUAL_SHARE, measured.speed.copy_bytes_per_second / MEMORY_SHARE
    return found


def fit_error(question: FitQuestion, shape: ModelShape, recipe: Recipe, seconds: float) -> float:
    """Returns the log of a training's measured over its predicted time."""
    link = question.link_bytes_per_second(recipe.gpus) if recipe.gpus > 1 else None
    rate = tokens_per_second(shape, recipe, question.gpu, link)
    return math.log(seconds * rate / (recipe.tokens * recipe.accumulation))


def anchored(calibration: ClusterCalibration, folder: Path, cluster: Cluster) -> ClusterCalibration:
    """Returns constants whose times are anchored; raises UsageError without usable runs."""
    errors = []
    try:
        trainings = measured_trainings(folder, gpu_named(cluster.device))
    except UsageError:
        if not cluster.measured:
            raise
        source = f"{calibration.source}; rates of products and copies as measured in {folder}"
        return dataclasses.replace(calibration, source=source)
    for shape, recipe, seconds in trainings:
        if recipe.adapter:
            continue
        layout = PlannedLayout(
            data=recipe.gpus,
            tensor=recipe.tensor,
            zero={"none": 0, "grad": 2}.get(recipe.sharding, 3),
            micro_batch=recipe.micro_batch,
            accumulation=recipe.accumulation,
            recompute=RECOMPUTE.index(recipe.recompute),
        )
        batch = recipe.gpus * recipe.micro_batch * recipe.accumulation
        question = ClusterQuestion(
            shape, cluster, recipe.sequence, batch, layout.devices, recipe.precision
        )
        predicted = predict(question, PlannedLayouts.of([layout]), calibration).seconds[0]
        errors.append(math.log(seconds / predicted))
    anchor = _anchor(errors, folder)
    return dataclasses.replace(
        calibration, anchor=anchor, source=f"{calibration.source}; {anchor.text}"
    )


def _anchor(errors: list[float], folder: Path) -> Anchor:
    if not errors:
        raise UsageError(f"{str(folder)!r} has no training of this kind; name another folder")
    return anchor_of(errors, str(folder))
