"""A user's model and strategy from a file: valid ones, mistakes and ids."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
import torch

from bench.expand import cells_of, expand
from bench.matrix import Host, Matrix
from bench.planning import kept_or_new_plan
from bench.run_options import CommandOptions
from harness.cell.cell import Cell
from harness.cell.errors import UsageError
from harness.host import user_code
from harness.planner.follow_up import matrix_file
from harness.record.store import Store
from harness.seam.registry import make_strategy, require_unchanged, with_defaults
from harness.worker.batches import Batches
from harness.workloads import make_workload, prepare_data
from harness.workloads.catalog import source_of
from harness.workloads.counts import model_facts
from harness.workloads.operators import activation_bytes
from tests import pages

PAGE = pages.ROOT / "docs" / "your_model.md"
TINY = next(block for block in pages.blocks(PAGE.read_text()) if block.path).text
HOST = Host("cpu", 2, 2**34)
LOSS = "        return F.cross_entropy(output, labels)\n"
WEIGHTED = """        return F.cross_entropy(output, labels, reduction="sum")

    def weight(self, labels):
        return len(labels)
"""


def written(folder: Path, text: str = TINY) -> str:
    (folder / "my.py").write_text(text)
    return f"{folder / 'my.py'}:Tiny"


def test_a_file_of_the_documents_is_a_workload(tmp_path: Path) -> None:
    assert len(TINY.splitlines()) <= 40
    workload = make_workload(written(tmp_path))
    workload.require_trainable(1)
    facts = model_facts(workload, 64)
    assert facts.parameters == 16 * 64 + 64 + 64 * 4 + 4
    assert facts.flops_per_sample > 2 * (16 * 64 + 64 * 4)


def test_reasons_name_the_file_without_its_folder(tmp_path: Path) -> None:
    cell = {"strategy": "vertical", "devices": 2, "workload": written(tmp_path)}
    (left,) = expand(Matrix(cells=[cell]), HOST).left_out
    assert left.reason.startswith("my.py:Tiny does not say how it can be split")


def test_an_installed_package_declares_workloads_that_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "points_package.py").write_text(TINY)
    information = tmp_path / "points_package-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Name: points-package\nVersion: 1.0\n")
    declared = "[parallelism_bench.workloads]\npoints = points_package:Tiny\n"
    (information / "entry_points.txt").write_text(declared)
    monkeypatch.syspath_prepend(tmp_path)
    read: list[dict[str, str]] = []
    entry_points = importlib.metadata.entry_points
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda **of: read.append(of) or entry_points(**of)
    )
    user_code.entry_points.cache_clear()
    try:
        cell = with_defaults(Cell(strategy="single", workload="points"))
        assert cell.workload_digest
        assert source_of("points") == ("points", cell.workload_digest)
        assert source_of("llama-96x2") == ("llama-96x2", "")
        assert read.count({"group": "parallelism_bench.workloads"}) == 1
    finally:
        user_code.entry_points.cache_clear()


def test_batches_of_real_tensors_are_counted(tmp_path: Path) -> None:
    """The documents' example indexes real points, which fake sample numbers cannot do."""
    workload = make_workload(written(tmp_path))
    assert activation_bytes(workload, 8, 64) >= 8 * 64 * 4


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("class Tiny", "class Other"),
        ("import torch\n", "import torch\nraise ValueError('no')\n"),
        ("def build(self)", "def make(self)"),
        ("return nn.Sequential(", "return (lambda *layers: 3)("),
        ("return nn.Sequential(", "return missing("),
        ("self.points[rows], self", "self.points[rows[:1]], self"),
        ("return self.points[rows], ", "return "),
        (LOSS, LOSS.replace("labels)", "labels, reduction='none')")),
        (LOSS, LOSS.replace("labels)", "labels, reduction='sum')")),
        (LOSS, "        return 1.0\n"),
        (LOSS, WEIGHTED.replace(', reduction="sum"', "")),
        ("nn.GELU()", "nn.RReLU(0.1, 0.9)"),
        ("nn.Linear(64, 4))", "nn.Linear(32, 4))"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path: Path, old: str, new: str) -> None:
    assert old in TINY
    name = written(tmp_path, TINY.replace(old, new))
    matrix = Matrix(cells=[{"strategy": "single"}, {"strategy": "ddp", "devices": 2}])
    with pytest.raises(UsageError) as raised:
        expand(matrix, HOST, model=name)
    assert "\n" not in str(raised.value)


def test_missing_files_are_mistakes(tmp_path: Path) -> None:
    for name in (f"{tmp_path}/none.py:Tiny", "no.such.module:Tiny"):
        with pytest.raises(UsageError):
            make_workload(name)
        with pytest.raises(UsageError):
            make_strategy(Cell(strategy=name))


def test_the_id_depends_on_the_file_but_not_its_folder(tmp_path: Path) -> None:
    ids = set()
    for folder, text in (("a", TINY), ("b", TINY), ("c", TINY + "\n")):
        (tmp_path / folder).mkdir()
        cell = with_defaults(Cell(strategy="ddp", workload=written(tmp_path / folder, text)))
        assert cell.workload.startswith(str(tmp_path / folder))
        require_unchanged(cell)
        ids.add(cell.id)
    assert len(ids) == 2
    with pytest.raises(UsageError):
        require_unchanged(cell.model_copy(update={"workload_digest": "another"}))


def test_the_model_replaces_that_of_every_cell(tmp_path: Path) -> None:
    strategies: list[dict[str, object]] = [
        {"strategy": "ddp", "devices": 2},
        {"strategy": "ddp", "devices": 2, "workload": "llama-nano+bf16"},
        {"strategy": "pipeline", "devices": 2},
        {"strategy": "ddp", "devices": 2, "optimizer": "muon"},
    ]
    name = written(tmp_path)
    expanded = expand(Matrix(cells=strategies), HOST, model=name)
    assert [cell.workload for cell in expanded.cells] == [name]
    assert {left.status for left in expanded.left_out} == {"refused"}
    assert len(expanded.left_out) == 3


def test_a_recorded_cell_is_planned_again(tmp_path: Path) -> None:
    cell = with_defaults(Cell(strategy="ddp", devices=2, workload=written(tmp_path)))
    recorded = Cell.model_validate_json(cell.model_dump_json())
    options = CommandOptions(cells=(recorded,), trials=1, timed_seconds=0)
    plan, _ = kept_or_new_plan(Store(tmp_path / "results"), options)
    assert [again.id for again in plan.cells] == [cell.id]
    matrix_file(tmp_path / "m.yaml", [cell], "one").write()
    assert [again.id for again in cells_of(str(tmp_path / "m.yaml"), [])] == [cell.id]


def test_weights_count_over_the_global_batch(tmp_path: Path) -> None:
    text = TINY.replace(LOSS, WEIGHTED.replace("len(labels)", "(labels + 1).sum()"))
    text = text.replace('reduction="sum")', 'reduction="none") @ (labels + 1.0)')
    workload = make_workload(written(tmp_path, text))
    workload.require_trainable(1)
    data = prepare_data("stdlib", workload, 64)

    def losses(ranks: int) -> float:
        model, total = workload.build(0), 0.0
        for rank in range(ranks):
            rows = slice(rank * 8 // ranks, (rank + 1) * 8 // ranks)
            batch = Batches(data, 0, 8, rows, torch.device("cpu")).fetch(1)
            output = model(batch.inputs)
            total += workload.loss(output, batch.labels, batch.label_tokens).item() / ranks
        return total

    assert losses(1) == pytest.approx(losses(4), rel=1e-5)
