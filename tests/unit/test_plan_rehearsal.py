"""Compares plans with rehearsals of exported cells; see docs/studies/planner-accuracy.md."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.api import tried_options
from bench.cli import app
from harness.cell.cell import Cell
from harness.planner.cluster.calibration import load
from harness.planner.cluster.cluster_plan import ClusterCandidate, plan
from harness.planner.cluster.footprint import WORKSPACE_BYTES, footprint
from harness.planner.cluster.hardware import cluster_of
from harness.planner.cluster.hf_config import parse_shape
from harness.planner.cluster.layout_memory import recipe_of
from harness.planner.cluster.question import ClusterQuestion
from harness.planner.cluster.recipe import RECOMPUTE, Precision
from harness.planner.follow_up import cells_of_layouts, fullest_rank

thorough = pytest.mark.thorough
quiet = pytest.mark.filterwarnings("ignore")
SMALL: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


@dataclass(frozen=True)
class Case:
    model: str
    """Name, or a model type, built in sizes SMALL."""
    devices: int
    batch: int
    sequence: int
    precision: Precision = "bf16"
    device: str = "h100-80gb"
    tied: bool = False

    @property
    def text(self) -> str:
        return f"{self.model}{'-tied' * self.tied}-{self.devices}-{self.precision}"

    def question(self, model: str) -> ClusterQuestion:
        cluster = cluster_of(self.device, 8, "nvlink,400gbit")
        shape = parse_shape(model)
        return ClusterQuestion(
            shape, cluster, self.sequence, self.batch, self.devices, self.precision
        )


CASES = [
    Case("llama", 8, 16, 256, "pure-bf16"),
    Case("llama", 1, 4, 256, "fp32", tied=True),
    Case("qwen3", 1, 16, 512, "pure-bf16", tied=True),
    Case("qwen3", 8, 64, 512),
    Case("olmo2", 1, 8, 512, "pure-bf16"),
    Case("gemma2", 1, 8, 512, "pure-bf16"),
    Case("gemma3_text", 2, 16, 512),
    pytest.param(Case("llama-7b", 64, 64, 4096), marks=thorough),
    pytest.param(Case("llama-7b", 16, 64, 2048, "pure-bf16"), marks=thorough),
    pytest.param(Case("llama-1b", 1, 8, 1024, "fp32"), marks=thorough),
    pytest.param(Case("llama-1b", 1, 8, 1024), marks=thorough),
    pytest.param(Case("llama-3b", 8, 16, 2048, device="a100-40gb"), marks=thorough),
]


def model_of(case: Case, folder: Path) -> str:
    if "-" in case.model:
        return case.model
    transformers = pytest.importorskip("transformers")
    sizes = SMALL | {"tie_word_embeddings": case.tied}
    transformers.AutoConfig.for_model(case.model, **sizes).save_pretrained(folder)
    return f"hf:{folder}"


def first_exported(question: ClusterQuestion, model: str) -> tuple[ClusterCandidate, Cell]:
    """Returns the best layout with a cell, without partial recomputation (counted within 8%)."""
    every = [
        candidate
        for candidate in plan(question, load(), top=1000).candidates
        if RECOMPUTE[candidate.layout.recompute] in ("none", "full")
    ]
    ranked = ((candidate.layout, float(place)) for place, candidate in enumerate(every))
    cell, place = next(cells_of_layouts(question, model, ranked, tried_options()))
    return every[int(place)], cell


def buckets(cell: Cell, candidate: ClusterCandidate, parameters: int) -> float:
    """Returns the bytes of DDP's buckets on one device, which plans do not count."""
    alone = cell.strategy in ("amp", "ddp") and candidate.layout.devices == 1
    return parameters * (2.0 if cell.workload.endswith("+bf16") else 4.0) * alone


@pytest.mark.slow
@quiet
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.text)
def test_the_exported_first_choice_allocates_what_is_counted(case: Case, tmp_path: Path) -> None:
    model = model_of(case, tmp_path)
    question = case.question(model)
    candidate, cell = first_exported(question, model)
    recipe = recipe_of(candidate.layout, case.sequence, case.precision, "transformers")
    assert candidate.layout.zero >= 2 or candidate.layout.devices == 1
    counted = footprint(question.shape, recipe).peak - WORKSPACE_BYTES
    counted += buckets(cell, candidate, question.shape.parameters)
    assert counted == pytest.approx(fullest_rank(cell).peak_bytes, rel=0.05)


@pytest.mark.slow
@quiet
def test_the_answer_shows_what_a_rehearsal_found(tmp_path: Path) -> None:
    model = model_of(Case("llama", 2, 8, 256), tmp_path)
    options = ["--model", model, "--gpus", "2 x h100", "--batch", "8", "--seq", "256", "--json"]
    result = CliRunner().invoke(app, ["plan", *options, "--top", "3", "--rehearse", "2"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["candidates"]
    assert all(row["rehearsal"] for row in rows[:2])
    found = [row for row in rows[:2] if row["rehearsed_bytes"]]
    assert found
    for row in found:
        assert 0.5 < row["allocated_bytes"] / row["rehearsed_bytes"] < 5
    assert rows[2]["rehearsed_bytes"] is None
