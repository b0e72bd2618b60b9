"""What `bench fits` and formulas count, against rehearsals of FSDP's, DDP's and autocast's code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.cell.cell import Cell
from harness.cell.training import Layout
from harness.planner.cluster.footprint import WORKSPACE_BYTES, footprint
from harness.planner.cluster.hf_config import parse_shape
from harness.planner.cluster.recipe import SUITE_CELLS, Adapter, Precision, Recipe
from harness.planner.rehearsal import ledger
from harness.planner.rehearsal.rehearse import RankMemory, rehearse
from harness.seam.registry import make_strategy
from harness.workloads import make_workload
from harness.workloads.counts import model_facts
from tests.tiny_models import save_config

quiet = pytest.mark.filterwarnings("ignore")
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}


@pytest.fixture
def without_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs' collectives need no memory of their own."""
    monkeypatch.setattr(ledger, "backend_bytes", lambda call: 0)


def cell_of(folder: Path, recipe: Recipe) -> Cell:
    suffix, precision = SUITE_CELLS[recipe.precision]
    if recipe.adapter:
        suffix, precision = "+bf16+lora", "fp32"
    strategy = "fsdp2" if recipe.sharding == "full" else "ddp" if recipe.gpus > 1 else "single"
    mixed = strategy == "fsdp2" and precision == "bf16"
    return Cell(
        strategy=strategy,
        options={"mixed_precision": True} if mixed else {},
        workload=f"hf:{folder}{suffix}",
        devices=recipe.gpus,
        global_batch=recipe.gpus,
        sequence_length=recipe.sequence,
        precision=precision,
        recompute=recipe.recompute,
        optimizer="adamw_fused",
    )


def rehearsed(folder: Path, recipe: Recipe) -> RankMemory:
    return rehearse(cell_of(folder, recipe), (0,)).fullest


SHARDED: dict[str, Any] = {"sharding": "full", "recompute": "full", "sequence": 32}


@pytest.mark.slow
@quiet
@pytest.mark.usefixtures("without_gloo")
@pytest.mark.parametrize(
    ("recipe", "vocabulary", "tied"),
    [
        (Recipe("bf16", gpus=8, **SHARDED), 32000, False),
        (Recipe("bf16", gpus=2, **SHARDED), 32000, True),
        (Recipe("fp32", gpus=8, **SHARDED), 32000, False),
        (Recipe("pure-bf16", gpus=8, **SHARDED), 4000, False),
        (Recipe(adapter=Adapter(8), gpus=8, **SHARDED), 8000, False),
        (Recipe("bf16", recompute="full", sequence=32), 8000, False),
        (Recipe("bf16", sequence=1024), 8000, False),
        (Recipe("bf16", gpus=2, sequence=1024), 8000, False),
        (Recipe("pure-bf16", gpus=2, sequence=1024), 8000, False),
    ],
    ids=["units", "tied", "fp32", "pure", "lora", "freed", "casts", "buckets", "uncast"],
)
def test_casts_buckets_gradients_and_gathers_live_as_long_as_in_torch(
    tmp_path: Path, recipe: Recipe, vocabulary: int, tied: bool
) -> None:
    """In FSDP2, embedding and head are one unit, whose gradients are whole until backward has
    ended."""
    save_config(tmp_path, "llama", **SIZES, vocab_size=vocabulary, tie_word_embeddings=tied)
    counted = footprint(parse_shape(f"hf:{tmp_path}/config.json"), recipe).peak - WORKSPACE_BYTES
    assert counted == pytest.approx(rehearsed(tmp_path, recipe).peak_bytes, rel=0.03)


@pytest.mark.slow
@quiet
@pytest.mark.usefixtures("without_gloo")
@pytest.mark.parametrize(("strategy", "precision"), [("fsdp2", "bf16"), ("fsdp1", "fp32")])
def test_formulas_count_copies_of_gradients_outside_blocks(
    tmp_path: Path, strategy: str, precision: Precision
) -> None:
    save_config(tmp_path, "llama", **SIZES, vocab_size=32000, tie_word_embeddings=False)
    recipe = Recipe(precision, gpus=8, sharding="full", recompute="full", sequence=32)
    cell = cell_of(tmp_path, recipe).model_copy(update={"strategy": strategy})
    facts = model_facts(make_workload(cell.workload), cell.sequence_length)
    states = make_strategy(cell).states(cell, Layout(data=8), facts)
    assert states is not None
    peak = rehearse(cell, (0,)).fullest.peak_bytes
    assert states.total + states.transient == pytest.approx(peak, rel=0.04)


@quiet
def test_updates_of_dtensors_allocate_no_whole_tensors(tmp_path: Path) -> None:
    """DTensor runs an operator on fake whole tensors to learn its result's shape."""
    save_config(tmp_path, "llama", **SIZES, vocab_size=32000)
    peak = rehearsed(tmp_path, Recipe("fp32", gpus=8, sharding="full", sequence=32))
    assert peak.peak_phase != "update"
