"""The GPU check's plan on a machine with one H100: what each step runs, and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer.main

from bench.cli import app
from bench.expand import Expanded, expand
from bench.gpu_check.outcomes import step_verdict
from bench.gpu_check.probes.__main__ import MODULES
from bench.gpu_check.steps import Step, read_plan
from bench.host import Host
from bench.matrix import parse_bytes, parse_changes, read_matrix
from harness.parity.reference_runs import reference_key
from harness.parity.verdict import in_fp32
from harness.run.expected import references_of, trial_seconds
from harness.spec.cell import Cell
from harness.spec.errors import UsageError
from harness.workloads import make_workload
from harness.workloads.counts import model_facts

H100 = Host("cuda", 1, int(79.6 * 2**30), name="NVIDIA H100 80GB HBM3", elsewhere=True)
MINUTES = 8
COMMAND_SECONDS = 8.0
"""Estimated time for one command's interpreter, imports and fork server."""
PROBE_SECONDS = 60.0
"""Estimated time for all probes in parallel; the slowest imports every library."""
SEARCH_SECONDS = 80.0
"""Estimated time for bench maxsize with one strategy and ten launches."""
PROFILE_SECONDS = 30.0
STEP = Step(name="a", claim="it runs", limit_seconds=60, words="run")


def words_of(step: Step) -> dict[str, Any]:
    """Returns the options of the step's command, as the command line reads them."""
    group: Any = typer.main.get_command(app)
    name, *words = step.arguments
    context = group.commands[name].make_context(name, [*words, "--json"], resilient_parsing=False)
    return dict(context.params)


def planned(step: Step) -> Expanded:
    """Returns the cells of a run on one H100."""
    words = words_of(step)
    return expand(
        read_matrix(words["matrix"]),
        H100,
        name=words["matrix"],
        only=words["only"] or [],
        skip=words["skip"] or [],
        changes=parse_changes(words["settings"] or []),
    )


RUNS = [step for _, step in read_plan().steps() if step.words.startswith("run ")]


@pytest.mark.parametrize("step", RUNS, ids=lambda step: step.name)
def test_each_run_has_cells_that_can_end_as_claimed(step: Step) -> None:
    found, words = planned(step), words_of(step)
    assert found.cells
    assert {left.status for left in found.left_out} <= {"unavailable"}
    assert words["trials"]
    assert words["timed_seconds"] == 0, "there is no control on a GPU"
    assert step.status in ("ok", "out_of_memory")
    if step.status == "out_of_memory":
        for cell in found.cells:
            assert cell.memory_limit_bytes
            facts = model_facts(make_workload(cell.workload), cell.sequence_length)
            assert facts.parameter_bytes > cell.memory_limit_bytes


def test_each_step_is_an_existing_command_or_probe() -> None:
    probes = {name for names in MODULES.values() for name in names}
    for _, step in read_plan().steps():
        if step.probe:
            assert step.probe in probes
        else:
            words = words_of(step)
            if step.arguments[0] == "maxsize":
                assert parse_bytes(words["budget"]) < H100.memory_bytes


def seconds_of(steps: Sequence[Step], kept: set[str]) -> float:
    """Predicts the seconds of consecutive commands. `kept`: keys of stored references, extended."""
    total = 0.0
    for step in steps:
        total += COMMAND_SECONDS
        if step.arguments[0] == "run":
            found, trials = planned(step), words_of(step)["trials"]
            total += sum(
                trial_seconds(cell, 1, H100.name) * (1 if cell.id in found.once else trials)
                for cell in found.cells
            )
            missing: dict[str, Cell] = {}
            for cell in found.cells:
                for one in filter(None, (cell, in_fp32(cell))):
                    if (key := reference_key(one)) not in kept:
                        missing[key] = one
            total += references_of(list(missing.values()), 1, H100.name).seconds
            kept.update(missing)
        else:
            total += SEARCH_SECONDS if step.arguments[0] == "maxsize" else PROFILE_SECONDS
    return total


def test_all_but_the_later_steps_take_eight_minutes_on_one_h100() -> None:
    """The gate comes before the lanes, and timed steps have their time reserved."""
    plan = read_plan()
    kept: set[str] = set()
    assert plan.gate
    gate = seconds_of([plan.gate], kept)
    lanes = [seconds_of(lane, set(kept)) for lane in plan.lanes]
    timed = sum(step.limit_seconds for step in plan.alone)
    assert PROBE_SECONDS + gate + max(lanes) + timed <= 60 * MINUTES, (gate, lanes, timed)
    assert PROBE_SECONDS + plan.gate.limit_seconds + timed <= 60 * MINUTES * 0.75
    for lane in (*plan.lanes, *plan.later):
        for step in lane:
            assert seconds_of([step], set(kept)) <= step.limit_seconds, step.name


@pytest.mark.parametrize(
    "text",
    [
        "lanes: 3",
        "probes: [{name: a, claim: b, limit_seconds: 1}]",
        "probes: [{name: A B, claim: b, limit_seconds: 1, probe: host}]",
        "gate: {name: a, claim: b, limit_seconds: 1, probe: host, words: run}",
        (
            "lanes: [[{name: a, claim: b, limit_seconds: 1, probe: host}]]\nalone:\n"
            "  - {name: a, claim: b, limit_seconds: 1, probe: fork}"
        ),
        "{",
    ],
)
def test_an_invalid_plan_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(UsageError, match=r"plan\.yaml"):
        read_plan(tmp_path / "plan.yaml")
    with pytest.raises(UsageError, match="missing"):
        read_plan(tmp_path / "missing.yaml")


@pytest.mark.parametrize(
    ("cells", "status", "verdict"),
    [
        ([{"status": "ok", "parity_verdict": "exact"}], "ok", "confirmed"),
        ([{"status": "ok", "parity_verdict": None}], "ok", "confirmed"),
        ([{"status": "ok", "parity_verdict": "diverged"}], "ok", "refuted"),
        ([{"status": "failed", "reason": "Cannot re-initialize CUDA"}], "ok", "refuted"),
        ([{"status": "ok"}, {"status": "unavailable", "reason": "no horovod"}], "ok", "confirmed"),
        ([{"status": "unavailable", "reason": "no horovod"}], "ok", "not checked"),
        ([{"status": "out_of_memory"}], "out_of_memory", "confirmed"),
        ([{"status": "failed"}], "out_of_memory", "refuted"),
    ],
)
def test_a_claim_is_confirmed_by_what_its_cells_did(
    cells: list[dict[str, Any]], status: str, verdict: str
) -> None:
    found, reason = step_verdict(STEP.model_copy(update={"status": status}), {"cells": cells})
    assert found == verdict
    assert reason
