"""CPU hosts keep measuring the same cells against the same references when GPU support changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.api import TRIED_MATRICES
from bench.expand import expand
from bench.matrix import Host, read_matrix
from harness.cell.cell import Cell
from harness.record.plan import Plan
from harness.record.store import Store
from harness.run.expected import trial_seconds
from harness.seam.registry import strategies

GOLDEN = Path(__file__).parents[1] / "golden" / "cpu_cells.json"
CPU = Host("cpu", 2, 24 * 2**30)
MATRICES = (*TRIED_MATRICES, "quick", "smoke", "precision", "scaling", "links")


def cells_of(matrix: str) -> list[list[str]]:
    """Returns the id, reference id and name of each cell, including left-out ones, sorted."""
    expanded = expand(read_matrix(matrix), CPU, name=matrix)
    everything = (*expanded.cells, *(left.cell for left in expanded.left_out))
    return sorted([cell.id, cell.reference().id, cell.name] for cell in everything)


@pytest.mark.parametrize("matrix", MATRICES)
def test_a_cpu_host_measures_the_same_cells_as_ever(matrix: str, update: bool) -> None:
    """Histories are joined by cell id, so changing an id with --update restarts its history."""
    if update:
        recorded = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
        GOLDEN.write_text(json.dumps(recorded | {matrix: cells_of(matrix)}, indent=1) + "\n")
    assert cells_of(matrix) == json.loads(GOLDEN.read_text())[matrix]


def test_the_time_of_a_kept_run_is_predicted_within_a_third() -> None:
    """Trials of heats also wait for each other."""
    reference = Store(Path(__file__).parents[2] / "results" / "reference").load(steps=False)
    separate = reference.trials["turn_began"].map(len) == 0
    trials = reference.trials[reference.trials["wall_seconds"].notna() & separate]
    plan = Plan.from_row(reference.runs.iloc[0].to_dict())
    trials = trials[trials["strategy"].isin(strategies())]  # not those that are gone
    cells = [Cell(**json.loads(cell)) for cell in trials["cell"]]
    predicted = sum(trial_seconds(one, 2, None, plan.timed_seconds_of(one) or 0.0) for one in cells)
    assert predicted == pytest.approx(trials["wall_seconds"].sum(), rel=1 / 3)


def test_each_real_node_has_the_hosts_cores() -> None:
    """Ranks share cores only if links are emulated, as all nodes are then on this host."""

    def seconds(nodes: int, cores: int, links: str = "") -> float:
        cell = Cell(strategy="ddp", workload="llama-micro", devices=4, nodes=nodes, links=links)
        return trial_seconds(cell, cores)

    assert seconds(2, 2) == seconds(2, 4) == seconds(1, 4)
    assert seconds(2, 2, "none") > 1.5 * seconds(2, 4, "none")
