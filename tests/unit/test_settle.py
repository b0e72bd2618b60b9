"""Planned layouts as cells: their strategies, written matrices and exports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from bench.cli.plan import tried_options
from bench.expand import cells_of
from harness.planner.cluster.hardware import cluster_of
from harness.planner.cluster.model_shape import ModelShape
from harness.planner.cluster.question import ClusterQuestion, PlannedLayout
from harness.planner.follow_up import cells_of_layout, cells_of_layouts, export_first, write_matrix
from harness.spec.cell import Cell
from harness.spec.errors import UsageError
from harness.strategy.registry import make_strategy

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
        assert stage is None or strategy.costs.zero_stage == stage
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
    write_matrix(file, cells, "two")
    assert yaml.safe_load(file.read_text())["description"] == "two"
    assert {cell.id for cell in cells_of(str(file), [])} == {cell.id for cell in cells}
    with pytest.raises(UsageError, match="exists already"):
        write_matrix(file, cells, "two")
    with pytest.raises(UsageError, match="cannot write"):
        write_matrix(tmp_path / "absent" / "open.yaml", cells, "two")


def test_the_first_that_has_an_export_is_written(tmp_path: Path) -> None:
    """Tensor parallelism of a GPT-2 has no export, and neither has three_d."""
    small = {"workload": "gpt2-nano", "devices": 2, "sequence_length": 32}
    together = {"tensor": 2, "pipeline": 2}
    in_3d = Cell(strategy="three_d", options=together, micro_batches=2, **small | {"devices": 4})
    cells = [(in_3d, 1.0), (Cell(strategy="ddp", **small), 1.25)]
    said = export_first(cells, tmp_path / "files")
    assert said.startswith("wrote ddp, the best exportable layout, 25% slower than the best")
    targets = {path.name for path in (tmp_path / "files").iterdir()}
    assert {"torchrun", "slurm"} <= targets
    assert (tmp_path / "files" / "torchrun" / "train.py").exists()


def test_no_export_has_the_reason_of_the_best_layout(tmp_path: Path) -> None:
    small = {"workload": "gpt2-nano", "sequence_length": 32}
    split = Cell(strategy="three_d", devices=4, micro_batches=2, **small)
    clipped = Cell(strategy="ddp", devices=2, clip_norm=0.5, **small)
    with pytest.raises(UsageError, match="use a llama workload"):
        export_first([(split, 1.0), (clipped, 2.0)], tmp_path)
    with pytest.raises(UsageError, match=r"clip_norm=0\.5"):
        export_first([(clipped, 1.0)], tmp_path)
    with pytest.raises(UsageError, match="nothing to export"):
        export_first([], tmp_path)


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
