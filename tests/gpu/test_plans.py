"""Plans of each matrix for hosts with 1, 2, 4 and 8 GPUs of 24, 40, 80 and 141 GB. No cell is
refused, and all fit in memory."""

from __future__ import annotations

import functools
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.api import TRIED_MATRICES
from bench.expand import Expanded, expand
from bench.matrix import Host, host_of, read_matrix
from bench.planning import kept_or_new_plan
from bench.run_options import CommandOptions
from harness.cell.cell import Cell
from harness.host import cores
from harness.parity.reference_runs import (
    DEFAULT_LIMIT_GIB,
    kept_bytes,
    reference_cell,
    reference_key,
)
from harness.parity.verdict import in_fp32
from harness.record.plan import Plan
from harness.record.store import Store
from harness.run.expected import references_of, trial_seconds
from harness.seam.peak_memory import CONTEXT_BYTES, peak_bytes
from harness.workloads import make_workload

GIB = 2**30
MATRICES = (*TRIED_MATRICES, "quick", "smoke", "scaling", "precision")
CARDS = {
    "L4": 22.5,
    "GeForce RTX 4090": 24.0,
    "A100-SXM4-40GB": 39.4,
    "H100 80GB HBM3": 79.6,
    "H200": 140.4,
}
"""Memory that NVML reports, in GiB."""
EXTREMES = {(1, "H200"), (8, "H100 80GB HBM3")}
"""Hosts that are planned for by default."""
HOSTS = [
    pytest.param(number, card, marks=[pytest.mark.thorough] * ((number, card) not in EXTREMES))
    for number, card in itertools.product((1, 2, 4, 8), CARDS)
    if card != "L4" or number == 8
]


def host(number: int, card: str) -> Host:
    return Host("cuda", number, int(CARDS[card] * GIB), name=f"NVIDIA {card}", elsewhere=True)


@functools.cache
def planned(matrix: str, number: int, card: str) -> Expanded:
    return expand(read_matrix(matrix), host(number, card), name=matrix)


def references(cells: Iterator[Cell]) -> dict[str, Cell]:
    """Returns cells and fp32 twins by the key of their reference."""
    both = itertools.chain.from_iterable((cell, in_fp32(cell)) for cell in cells)
    return {reference_key(cell): cell for cell in both if cell}


@pytest.mark.parametrize(("number", "card"), HOSTS)
@pytest.mark.parametrize("matrix", MATRICES)
def test_no_size_that_the_matrix_chose_is_refused(matrix: str, number: int, card: str) -> None:
    """Micro-batches, heads, blocks and batches divide at every GPU count. If cells need more GPUs,
    the reason names the host's number."""
    found = planned(matrix, number, card)
    assert found.cells
    refused = {left.cell.name: left.reason for left in found.left_out if left.status == "refused"}
    assert refused == {}
    assert all(str(number) in left.reason for left in found.left_out)
    if number == 8:
        assert found.left_out == ()


@pytest.mark.parametrize(("number", "card"), HOSTS)
@pytest.mark.parametrize("matrix", MATRICES)
def test_cells_timed_in_bf16_keep_a_gpu_busy(matrix: str, number: int, card: str) -> None:
    """With fewer than 4096 tokens per GPU, the share of communication would be unrealistic."""
    found = planned(matrix, number, card)
    timed = [cell for cell in found.cells if cell.id not in found.once]
    halves = [
        cell
        for cell in timed
        if cell.precision == "bf16" and make_workload(cell.workload).kind != "image"
    ]
    few = {c.name for c in halves if c.global_batch * c.sequence_length < 4096 * c.devices}
    assert few == set()
    others = {cell.id for cell in timed if cell.precision != "bf16"}
    assert matrix == "precision" or len(halves) > len(others), (
        "only a few cells ask for fp32 or fp16 by name"
    )
    assert all(cell.learning_rate == 1e-4 for cell in timed if cell.optimizer == "adamw")


def method(cell: Cell) -> tuple[str, str, str]:
    return cell.strategy, json.dumps(cell.options, sort_keys=True), cell.launcher


@pytest.mark.parametrize("matrix", [*TRIED_MATRICES, "quick", "smoke", "scaling"])
def test_each_strategy_that_is_timed_in_bf16_is_checked_in_fp32(matrix: str) -> None:
    """One fp32 launch of a strategy shows errors that bf16's tolerance would hide."""
    found = planned(matrix, 8, "H100 80GB HBM3")
    twins = [cell for cell in found.cells if cell.id in found.once]
    assert {cell.precision for cell in twins} == {"fp32"}
    checked = {method(cell) for cell in found.cells if cell.precision == "fp32"}
    unchecked = {
        cell.label
        for cell in found.cells
        if cell.precision == "bf16" and method(cell) not in checked
    }
    assert unchecked <= {
        "amp(opt_level=O1)",
        "amp(opt_level=O2)",
        "amp(opt_level=O3)",
        "fsdp2(mixed_precision=true)",
        "deepspeed(stage=2)",  # checked in full
    }
    settings = {(c.workload, c.precision) for c in found.cells if c.id not in found.once}
    assert settings.isdisjoint(
        (c.workload, c.precision) for c in twins if c.workload == "llama-512x16"
    ), "never ranked together"


@pytest.mark.parametrize(("number", "card"), HOSTS)
@pytest.mark.parametrize("matrix", MATRICES)
def test_cells_and_their_references_fit_the_gpu_and_the_disk(
    matrix: str, number: int, card: str
) -> None:
    """A cell takes at most 90% of a GPU's memory by its strategy's formula, and its reference
    60%. References together fit the disk limit."""
    cells = planned(matrix, number, card).cells
    every = references(iter(cells))
    assert sum(map(kept_bytes, every.values())) <= DEFAULT_LIMIT_GIB * GIB
    memory = CARDS[card] * GIB
    assert [cell.name for cell in cells if peak_bytes(cell) > 0.9 * memory] == []
    largest = {key: peak_bytes(reference_cell(cell)) + CONTEXT_BYTES for key, cell in every.items()}
    assert {key: size for key, size in largest.items() if size > 0.6 * memory} == {}


@pytest.mark.parametrize("matrix", ["full", "compile", "tune"])
@pytest.mark.parametrize("number", [1, 8])
def test_compiled_cells_stand_next_to_plain_ones(matrix: str, number: int) -> None:
    """Compiled cells are timed alongside the same strategy uncompiled, in the same setting."""
    found = planned(matrix, number, "H100 80GB HBM3")
    timed = [cell for cell in found.cells if cell.id not in found.once]
    plain = {cell.model_copy(update={"system": ""}).id for cell in timed}
    compiled = [cell for cell in timed if cell.compile != "none"]
    assert {"ddp", "fsdp2"} <= {cell.strategy for cell in compiled if cell.devices == number}
    alike = {"compile": "none", "recompute": "none", "system": "", "micro_batches": 1}
    lonely = {c.name for c in compiled if c.model_copy(update=alike).id not in plain}
    assert {name for name in lonely if not name.startswith("tensor")} == set()


@pytest.mark.parametrize("gibibytes", [8, 11.9, 15])
def test_smaller_gpus_have_sizes_of_their_own(gibibytes: float) -> None:
    small = Host("cuda", 1, int(gibibytes * GIB), elsewhere=True)
    found = expand(read_matrix("full"), small, name="full")
    assert [left.cell.name for left in found.left_out if left.status == "refused"] == []


@pytest.mark.parametrize("card", ["L4", "H100 80GB HBM3"])
def test_full_on_eight_gpus_is_expected_within_an_hour(card: str) -> None:
    """The hour includes fp32 twins, but not references, which are kept for the next run. A cell's
    time limit is at least five times its predicted time. The prediction's constants are in
    harness/run/expected.py."""
    found, name = planned("full", 8, card), f"NVIDIA {card}"
    trials = read_matrix("full").trials_on(host(8, card))
    plan = Plan.new("full", found.cells, trials, (), not_compared=found.once)
    assert sum(trial_seconds(cell, 1, name) for cell, _ in plan.schedule()) <= 3600
    assert references_of(found.cells, 1, name).seconds <= 750
    for cell in found.cells:
        assert cell.time_limit_seconds >= 5 * trial_seconds(cell, 1, name), cell.name


@pytest.mark.parametrize(("card", "number"), [("H100 80GB HBM3", 1), ("L4", 8)])
def test_float8_is_compared_with_the_same_in_bf16_on_gpus(card: str, number: int) -> None:
    """Kernels return float8 products in bf16, so a comparison with fp32 would blame float8 for the
    casts."""
    cells = planned("tune", number, card).cells
    eight = [cell for cell in cells if cell.workload.endswith("+float8")]
    assert {cell.precision for cell in eight} == {"bf16"}
    plain = {"workload": eight[0].workload.removesuffix("+float8")}
    ids = {cell.id for cell in cells}
    assert [cell.name for cell in eight if cell.model_copy(update=plain).id not in ids] == []


def test_twins_are_launched_once_and_that_survives_the_store() -> None:
    found = planned("smoke", 8, "H200")
    plan = Plan.new("smoke", found.cells, 3, (), not_compared=found.once)
    launches = Counter(cell.id for cell, _ in plan.schedule())
    assert {launches[cell] for cell in found.once} == {1}
    assert {launches[cell.id] for cell in found.cells if cell.id not in found.once} == {3}
    row = {"run_id": plan.run_id, "matrix": "smoke", "plan": plan.to_json()}
    assert Plan.from_row(row) == plan


def test_a_plan_for_another_host_does_not_depend_on_the_cores_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned_here(allowed: int, name: str) -> tuple[frozenset[str], dict[str, int]]:
        monkeypatch.setattr(cores, "allowed_cores", lambda: list(range(allowed)))
        plan, _ = kept_or_new_plan(Store(tmp_path), CommandOptions(matrix="smoke", host=name))
        return plan.not_compared, plan.launches_per_round

    plans = [planned_here(allowed, "8 x h100-80gb") for allowed in (2, 112)]
    assert plans[0] == plans[1] == planned_here(2, "8 x h100-80gb, 112 cores")
    assert planned_here(112, "8 x h100-80gb, 4 cores")[0] > plans[0][0]


@pytest.mark.parametrize(
    ("name", "gpus", "there"),
    [("h100-80gb", 1, None), ("8 x h100-80gb, 112 cores", 8, 112), ("2xL4,1 core", 2, 1)],
)
def test_cores_of_another_host_are_given_or_unknown(name: str, gpus: int, there: int) -> None:
    found = host_of(name, 1)
    assert (found.num_devices, found.cores) == (gpus, there)
