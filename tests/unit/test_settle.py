"""Layouts as cells of the suite: which strategy trains with which, and what is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from bench.expand import cells_of
from harness.planner.cluster.hardware import cluster_of
from harness.planner.cluster.layouts import Layout
from harness.planner.cluster.model_shape import ModelShape
from harness.planner.cluster.question import Question
from harness.planner.follow_up import cells_of_layout, cells_of_layouts, export_first, write_matrix
from harness.spec.cell import Cell
from harness.spec.errors import UsageError
from harness.strategy.registry import make_strategy

SHAPE = ModelShape("llama-7b", 32, 4096, 32, 11008, 32000)
QUESTION = Question(SHAPE, cluster_of("h100-80gb", 8, "nvlink,400gbit"), 2048, 64, 8)


@pytest.mark.parametrize(
    ("layout", "stage"),
    [
        (Layout(data=8, micro_batch=8), 0),
        (Layout(data=8, zero=1, micro_batch=8), 1),
        (Layout(data=8, zero=2, micro_batch=4, accumulation=2), 2),
        (Layout(data=8, zero=3, micro_batch=8, recompute=2), 3),
        (Layout(tensor=8, micro_batch=64), None),
        (Layout(pipeline=8, micro_batch=4, accumulation=16), None),
        (Layout(data=2, pipeline=2, tensor=2, micro_batch=8, accumulation=4), 0),
        (Layout(data=2, pipeline=2, tensor=2, zero=1, micro_batch=8, accumulation=4), 1),
    ],
)
def test_a_layout_is_trained_by_a_strategy_with_its_ranks(
    layout: Layout, stage: int | None
) -> None:
    cells = cells_of_layout(QUESTION, "llama-7b", layout)
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
    assert cells_of_layout(QUESTION, "llama-7b", Layout(context=8, micro_batch=64)) == []
    with pytest.raises(UsageError, match="'llama-405b' is known to the planner by its sizes only"):
        cells_of_layout(QUESTION, "llama-405b", Layout(data=8, micro_batch=8))


def test_a_written_matrix_has_the_same_cells(tmp_path: Path) -> None:
    cells = [
        *cells_of_layout(QUESTION, "llama-7b", Layout(data=8, zero=1, micro_batch=8)),
        *cells_of_layout(QUESTION, "llama-7b", Layout(pipeline=8, micro_batch=4, accumulation=16)),
    ]
    file = tmp_path / "open.yaml"
    write_matrix(file, cells, "two")
    assert yaml.safe_load(file.read_text())["description"] == "two"
    assert {cell.id for cell in cells_of(str(file), [])} == {cell.id for cell in cells}
    with pytest.raises(UsageError, match="is there already"):
        write_matrix(file, cells, "two")
    with pytest.raises(UsageError, match="cannot write"):
        write_matrix(tmp_path / "absent" / "open.yaml", cells, "two")


def test_the_first_that_has_an_export_is_written(tmp_path: Path) -> None:
    """Tensor parallelism of a GPT-2 has none, nor has what contains it."""
    small = {"workload": "gpt2-nano", "devices": 2, "sequence_length": 32}
    together = {"tensor": 2, "pipeline": 2}
    in_3d = Cell(strategy="three_d", options=together, micro_batches=2, **small | {"devices": 4})
    cells = [(in_3d, 1.0), (Cell(strategy="ddp", **small), 1.25)]
    said = export_first(cells, tmp_path / "files")
    assert said.startswith("wrote ddp, the best that has an export, 25% slower than the best")
    targets = {path.name for path in (tmp_path / "files").iterdir()}
    assert {"torchrun", "slurm"} <= targets
    assert (tmp_path / "files" / "torchrun" / "train.py").exists()
    with pytest.raises(UsageError, match="none of the layouts has an export"):
        export_first(cells[:1], tmp_path / "none")


def test_layouts_that_divide_alike_are_asked_once() -> None:
    layouts = [
        (Layout(tensor=4, pipeline=2, micro_batch=4, accumulation=16), 1.0),
        (Layout(tensor=4, pipeline=2, micro_batch=2, accumulation=32), 2.0),
        (Layout(data=8, zero=3, micro_batch=8), 3.0),
        (Layout(data=8, zero=3, micro_batch=4, accumulation=2), 4.0),
    ]
    question = replace(QUESTION, sequence_length=1024)
    cells = list(cells_of_layouts(question, "gpt2-large", layouts))
    assert {value for _, value in cells} == {1.0, 3.0, 4.0}
