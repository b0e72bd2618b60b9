"""Planned layouts as cells: their strategies, written matrices and exports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from bench import api
from bench.api import tried_options
from bench.cli.plan import plan as command
from bench.expand import cells_of
from harness.cell.cell import Cell
from harness.cell.errors import UsageError
from harness.planner.cluster.cluster_plan import open_questions
from harness.planner.cluster.hardware import cluster_of
from harness.planner.cluster.model_shape import ModelShape
from harness.planner.cluster.question import ClusterQuestion, PlannedLayout
from harness.planner.follow_up import cells_of_layout, cells_of_layouts, first_export, matrix_file
from harness.seam.registry import make_strategy
from tests.commands import ask, told

SHAPE = ModelShape("llama-7b", 32, 4096, 32, 11008, 32000)
QUESTION = ClusterQuestion(SHAPE, cluster_of("h100-80gb", 8, "nvlink,400gbit"), 2048, 64, 8)
TRIED = tried_options()


@pytest.mark.parametrize(
    ("layout", "stage"),
    [
        (PlannedLayout(data=8, micro_batch=8), 0),
        (PlannedLayout(data=8, zero=1, micro_batch=8), 1),
        (PlannedLayout(data=8, zero=2, micro_batch=4, accumulation=2), 2),
        (PlannedLayout(data=8, zero=3, micro_batch=8, recompute=2), 3),
        (PlannedLayout(tensor=8, micro_batch=64), None),
        (PlannedLayout(pipeline=8, micro_batch=4, accumulation=16), None),
        (PlannedLayout(data=2, pipeline=2, tensor=2, micro_batch=8, accumulation=4), 0),
        (PlannedLayout(data=2, pipeline=2, tensor=2, zero=1, micro_batch=8, accumulation=4), 1),
    ],
)
def test_a_layout_is_trained_by_a_strategy_with_its_ranks(
    layout: PlannedLayout, stage: int | None
) -> None:
    cells = cells_of_layout(QUESTION, "llama-7b", layout, TRIED)
    assert cells
    for cell in cells:
        strategy = make_strategy(cell)
        ranks = strategy.layout(8)
        assert (ranks.data, ranks.pipeline, ranks.tensor) == (
            layout.data,
            layout.pipeline,
            layout.tensor,
        )
        assert stage is None or strategy.zero_stage == stage
        assert cell.micro_batches == layout.accumulation
        assert cell.recompute == ("none", "selective", "full")[layout.recompute]
        assert cell.device == "cuda"


def test_a_layout_that_no_strategy_has_gives_no_cell() -> None:
    assert (
        cells_of_layout(QUESTION, "llama-7b", PlannedLayout(context=8, micro_batch=64), TRIED) == []
    )
    with pytest.raises(UsageError, match="'llama-405b'"):
        cells_of_layout(QUESTION, "llama-405b", PlannedLayout(data=8, micro_batch=8), TRIED)


def test_a_written_matrix_has_the_same_cells(tmp_path: Path) -> None:
    cells = [
        *cells_of_layout(QUESTION, "llama-7b", PlannedLayout(data=8, zero=1, micro_batch=8), TRIED),
        *cells_of_layout(
            QUESTION, "llama-7b", PlannedLayout(pipeline=8, micro_batch=4, accumulation=16), TRIED
        ),
    ]
    file = tmp_path / "open.yaml"
    matrix_file(file, cells, "two").write()
    assert yaml.safe_load(file.read_text())["description"] == "two"
    assert {cell.id for cell in cells_of(str(file), [])} == {cell.id for cell in cells}
    for act in (matrix_file(file, cells, "two").check, matrix_file(file, cells, "two").write):
        with pytest.raises(UsageError, match="exists already"):
            act()
    with pytest.raises(UsageError, match="cannot write"):
        matrix_file(tmp_path / "absent" / "open.yaml", cells, "two").write()


def test_the_first_that_has_an_export_is_written(tmp_path: Path) -> None:
    """Tensor parallelism of a GPT-2 has no export, and neither has three_d."""
    small = {"workload": "gpt2-nano", "devices": 2, "sequence_length": 32}
    together = {"tensor": 2, "pipeline": 2}
    in_3d = Cell(strategy="three_d", options=together, micro_batches=2, **small | {"devices": 4})
    cells = [(in_3d, 1.0), (Cell(strategy="ddp", **small), 1.25)]
    export = first_export(cells, tmp_path / "files")
    export.check()
    export.write()
    assert export.message.startswith(
        "wrote ddp, the best exportable layout, 25% slower than the best"
    )
    targets = {path.name for path in (tmp_path / "files").iterdir()}
    assert {"torchrun", "slurm"} <= targets
    assert (tmp_path / "files" / "torchrun" / "train.py").exists()


def test_no_export_has_the_reason_of_the_best_layout(tmp_path: Path) -> None:
    small = {"workload": "gpt2-nano", "sequence_length": 32}
    split = Cell(strategy="three_d", devices=4, micro_batches=2, **small)
    clipped = Cell(strategy="ddp", devices=2, clip_norm=0.5, **small)
    with pytest.raises(UsageError, match="use a llama workload"):
        first_export([(split, 1.0), (clipped, 2.0)], tmp_path)
    with pytest.raises(UsageError, match=r"clip_norm=0\.5"):
        first_export([(clipped, 1.0)], tmp_path)
    with pytest.raises(UsageError, match="nothing to export"):
        first_export([], tmp_path)


SEVEN_B = ("--model", "llama-7b", "--gpus", "8 x h100", "--batch", "64", "--seq", "2048", "--json")


def test_a_matrix_has_all_ties_however_few_rows_are_shown(tmp_path: Path) -> None:
    written = []
    for top in ("1", "10"):
        told(command, *SEVEN_B, "--top", top, "--write-matrix", str(tmp_path / f"{top}.yaml"))
        written.append((tmp_path / f"{top}.yaml").read_text())
    assert written[0] == written[1]
    every = api.plan("llama-7b", batch=64, sequence_length=2048, top=1000).candidates
    tied = {candidate.layout for candidate in open_questions(every, "throughput")}
    assert len(tied) > 10
    expected = {
        cell.id
        for layout in (every[0].layout, *tied)
        for cell in cells_of_layout(QUESTION, "llama-7b", layout, TRIED)
    }
    assert {cell.id for cell in cells_of(str(tmp_path / "1.yaml"), [])} == expected


@pytest.mark.parametrize("blocker", ["chosen/slurm/job.sbatch", "open.yaml"])
def test_an_existing_target_leaves_nothing_written(blocker: str, tmp_path: Path) -> None:
    (tmp_path / blocker).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / blocker).write_text("mine")
    targets = {"--write-matrix": "open.yaml", "--export": "chosen"}
    options = [word for name, file in targets.items() for word in (name, str(tmp_path / file))]
    with pytest.raises(UsageError, match="exists"):
        ask(command, *SEVEN_B, *options)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / blocker]
    (tmp_path / blocker).unlink()
    told(command, *SEVEN_B, *options)
    for file in ("open.yaml", "chosen/slurm/job.sbatch"):
        assert (tmp_path / file).stat().st_size


def test_layouts_that_divide_alike_are_asked_once() -> None:
    layouts = [
        (PlannedLayout(tensor=4, pipeline=2, micro_batch=4, accumulation=16), 1.0),
        (PlannedLayout(tensor=4, pipeline=2, micro_batch=2, accumulation=32), 2.0),
        (PlannedLayout(data=8, zero=3, micro_batch=8), 3.0),
        (PlannedLayout(data=8, zero=3, micro_batch=4, accumulation=2), 4.0),
    ]
    question = replace(QUESTION, sequence_length=1024)
    cells = list(cells_of_layouts(question, "gpt2-large", layouts, TRIED))
    assert {value for _, value in cells} == {1.0, 3.0, 4.0}
