"""Predictions for this machine's cells: arithmetic, calibration and answers."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.cli.predict import predict
from bench.cli.validate import validate
from bench.cli.whatif import whatif
from bench.expand import cells_of
from harness.analysis.setting import Setting
from harness.planner.local import plan_request
from harness.planner.local.cpu_prediction import (
    CellColumns,
    CellFacts,
    CpuMemoryConstants,
    CpuTimeConstants,
    Observation,
    peak_bytes,
    step_seconds,
)
from harness.planner.local.local_calibration import (
    CpuCalibration,
    calibrate_cells,
    first_choices,
    leave_out,
    score,
    with_spreads,
)
from harness.planner.local.local_plan import (
    LocalCandidate,
    LocalGoal,
    LocalVariant,
    ScalingPoint,
    explanation,
    open_questions,
    rank_variants,
)
from harness.planner.local.measurements import (
    LocalMeasurements,
    facts_of,
    read_measurements,
    variants_of,
)
from harness.spec.cell import Cell
from harness.spec.errors import Unavailable, UsageError
from harness.spec.link import Link
from harness.strategy.formulas import BESIDE_BACKWARD
from harness.strategy.registry import with_defaults
from tests.commands import ask, told
from tests.unit.made_results import stored, trial_rows

MEGA = 1e6
TRUE_TIME = CpuTimeConstants(fp32_rate=60.0, memory_rate=18.0, operator=8e-6, local_rate=0.4)
TRUE_MEMORY = CpuMemoryConstants(overhead=12.0, activations=1.4)
LIBRARIES = {"plain": 0.0, "averaged": 0.1, "sharded": 0.7, "staged": -0.2}
"""Logarithm of each library's overhead in the made measurements."""


def facts(size: float = 1.0, strategy: str = "plain", **more: object) -> CellFacts:
    """Returns a cell with a model of this relative size."""
    ranks = 1 if strategy == "plain" else 2
    staged = strategy == "staged"
    values = {
        "workload": f"model-{size:g}",
        "setting": f"model-{size:g} on {ranks}",
        "links": "",
        "label": strategy,
        "engine": strategy if strategy != "plain" else "single",
        "precision": "fp32",
        "exact": True,
        "stand_in": False,
        "data": 1 if staged else ranks,
        "pipeline": ranks if staged else 1,
        "tensor": 1,
        "cores": 2,
        "micro_batches": 4 if staged else 1,
        "flops": 4e9 * size,
        "operators": 1800,
        "moved_bytes": 700 * MEGA * size**0.5,
        "tensors": 40,
        "state_bytes": 20 * MEGA * size,
        "library_bytes": 0.0,
        "transient_bytes": 5 * MEGA * size,
        "trained_bytes": 5 * MEGA * size,
        "optimizer_bytes": 10 * MEGA * size,
        "activation_bytes": 30 * MEGA * size**0.5,
        "sent_bytes": 0.0 if ranks == 1 else 5 * MEGA * size,
        "messages": {"plain": 0.0, "averaged": 1.0, "sharded": 15.0, "staged": 8.0}[strategy],
    }
    return CellFacts(**(values | more))  # type: ignore[arg-type]


def measured(cells: Sequence[CellFacts], noise: float = 0.0) -> list[Observation]:
    """Returns observations under the true constants. `noise`: standard deviation of log time."""
    effects = np.array([LIBRARIES[cell.label] for cell in cells])
    columns, draw = CellColumns(cells), np.random.default_rng(0)
    seconds = step_seconds(columns, TRUE_TIME, effects).total
    peaks = peak_bytes(columns, TRUE_MEMORY, effects / 10)
    seconds = seconds * np.exp(noise * draw.standard_normal(len(cells)))
    return [
        Observation(cell, float(second), float(peak), float(second) * 0.98, float(second) * 1.02)
        for cell, second, peak in zip(cells, seconds, peaks, strict=True)
    ]


@pytest.fixture(scope="module")
def many() -> list[Observation]:
    sizes = (0.3, 0.6, 1.0, 2.0, 4.0)
    return measured([facts(size, strategy) for size in sizes for strategy in LIBRARIES], 0.02)


@pytest.fixture(scope="module")
def calibration(many: list[Observation]) -> CpuCalibration:
    return with_spreads(calibrate_cells(many), leave_out(many))


def test_a_workload_that_was_not_measured_is_predicted(calibration: CpuCalibration) -> None:
    other = [facts(1.5, strategy) for strategy in LIBRARIES]
    true = measured(other)
    seconds = [cell.seconds for cell in true]
    assert calibration.seconds(other) == pytest.approx(seconds, rel=0.06)
    peaks = [cell.peak_bytes for cell in true]
    assert calibration.peak_bytes(other) == pytest.approx(peaks, rel=0.04)


def test_scores_of_left_out_workloads_and_first_choices(many: list[Observation]) -> None:
    rows = leave_out(many)
    assert {row.part for row in rows} == {cell.facts.workload for cell in many}
    assert all(row.known for row in rows)
    by_part = {part.part: part for part in score(rows)}
    total = by_part["all"]
    assert total.cells == total.known == len(many)
    assert total.median_time_error is not None
    assert total.median_memory_error is not None
    assert total.median_time_error < 0.06
    assert total.median_memory_error < 0.04

    def only_the_fastest(own: Sequence[Observation]) -> list[Observation]:
        return [min(own, key=lambda cell: cell.seconds)]

    choices = first_choices(rows, only_the_fastest)
    assert len(choices) == 5
    assert sum(choice.significant for choice in choices) <= 1
    wrong = [dataclasses.replace(row, seconds=1 / row.seconds) for row in rows]
    assert all(choice.significant for choice in first_choices(wrong, only_the_fastest))


@given(
    size=st.floats(0.1, 10),
    strategy=st.sampled_from(sorted(LIBRARIES)),
    slower=st.floats(1, 1e4),
    cores=st.integers(1, 4),
)
def test_slower_links_and_fewer_cores_never_speed_up(
    size: float, strategy: str, slower: float, cores: int
) -> None:
    def seconds(**more: object) -> float:
        cell = facts(size, strategy, **more)
        return float(step_seconds(CellColumns([cell]), TRUE_TIME, np.zeros(1)).total[0])

    fast = seconds(link_bytes_per_second=1e9, link_seconds=1e-4, cores=cores)
    assert fast <= seconds(link_bytes_per_second=1e9 / slower, link_seconds=1e-4, cores=cores)
    assert fast <= seconds(link_bytes_per_second=1e9, link_seconds=1e-4 * slower, cores=cores)
    assert seconds(cores=cores + 1) <= seconds(cores=cores) < float("inf")


def test_communication_and_extra_work_cost_time() -> None:
    """Each addition takes longer, and shared memory is faster than TCP."""

    def seconds(**more: object) -> float:
        cell = facts(1.0, "averaged", **more)
        return float(step_seconds(CellColumns([cell]), CpuTimeConstants(), np.zeros(1)).total[0])

    plain = seconds()
    assert seconds(messages=2.0) == pytest.approx(plain + CpuTimeConstants().message)
    assert seconds(sharded=True) == pytest.approx(
        plain + CpuTimeConstants().unit - CpuTimeConstants().message
    )
    assert seconds(disk_bytes=1.5e9) == pytest.approx(plain + 1.0)
    assert seconds(uses_shared_memory=True) < plain
    for more in ({"coded_elements": 1e6}, {"optimizer_flops": 1e9}, {"convolutions": 30}):
        assert seconds(**more) > plain
    assert seconds(threads=2) > plain


def test_collectives_are_counted_as_libraries_call_them() -> None:
    """llama-micro has 39 parameters, and 4 blocks with 5 layers split by column and 2 by row."""
    here = LocalMeasurements("", 2, 10**9, (), {})

    def messages(strategy: str, **options: object) -> float:
        return facts_of(
            Cell(strategy=strategy, options=options, devices=2, workload="llama-micro"), here
        ).messages

    assert messages("collectives") == 39
    assert messages("collectives", average="parameters", period=3) == 13
    assert messages("tensor") == 28
    assert messages("fsdp2") == 5 + 4 + 5
    assert messages("fsdp2", reshard_after_forward=False) == 5 + 5
    assert messages("fsdp1", auto_wrap=False) == 1 + 1
    assert messages("ddp", bucket_cap_mb=1) == pytest.approx(1 + 3 * BESIDE_BACKWARD)


def variants(cells: Sequence[CellFacts], known: dict[str, Observation]) -> list[LocalVariant]:
    return [LocalVariant(Cell(strategy=cell.label), cell, known.get(cell.label)) for cell in cells]


def test_measured_cells_answer_and_others_are_predicted(
    many: list[Observation], calibration: CpuCalibration
) -> None:
    own = {cell.facts.label: cell for cell in many if cell.facts.workload == "model-1"}
    faster = facts(
        1.0, "averaged", exact=False, flops=1e8, moved_bytes=1e6, label="averaged(rarely)"
    )
    cells = [*(facts(1.0, name) for name in LIBRARIES), faster]
    plan = rank_variants(
        "model-1", variants(cells, {"plain": own["plain"]}), calibration, 8, 2 * 10**9
    )
    by_label = {candidate.label: candidate for candidate in plan.candidates}
    assert by_label["plain"].measured
    assert by_label["plain"].seconds == own["plain"].seconds
    assert not by_label["averaged"].measured
    assert plan.candidates[0].label == "averaged"
    for candidate in (*plan.candidates, *plan.inexact):
        assert candidate.seconds_low < candidate.seconds < candidate.seconds_high
        assert 0 <= candidate.fits <= 1
        assert all(value >= 0 for value in candidate.parts.values())
    assert [candidate.label for candidate in plan.inexact] == ["averaged(rarely)"]
    text = " ".join(explanation(plan))
    assert "Use averaged: " in text
    assert "a different training: averaged(rarely)" in text
    tied = open_questions(plan.candidates, plan.goal)
    assert all(other in plan.candidates[1:] for other in tied)


def test_memory_decides_where_it_is_the_goal_or_short(calibration: CpuCalibration) -> None:
    cells = [facts(1.0, name) for name in LIBRARIES]
    least = rank_variants("s", variants(cells, {}), calibration, 8, 2 * 10**9, "memory").candidates
    peaks = [candidate.peak_bytes for candidate in least]
    assert peaks == sorted(peaks)
    short = rank_variants("s", variants(cells, {}), calibration, 8, int(1.3 * peaks[0])).candidates
    assert [candidate.fits for candidate in short] != [1.0] * len(short)


def test_ties_in_memory_are_those_of_memory(calibration: CpuCalibration) -> None:
    cells = [facts(1.0, name) for name in LIBRARIES]
    plan = rank_variants("s", variants(cells, {}), calibration, 8, 2 * 10**9, "memory")
    first = plan.candidates[0]

    def another(label: str, seconds: float, peak: float, fits: float = 1.0) -> LocalCandidate:
        return dataclasses.replace(
            first,
            label=label,
            seconds=first.seconds * seconds,
            peak_bytes=first.peak_bytes * peak,
            peak_low=first.peak_low * peak,
            peak_high=first.peak_high * peak,
            fits=fits,
        )

    faster, near = another("faster", 0.1, 10.0), another("near", 9.0, 1.0001)
    assert open_questions((first, near, faster), "memory") == [near]

    def told_about(goal: LocalGoal, *others: LocalCandidate) -> str:
        answer = dataclasses.replace(plan, goal=goal, candidates=(first, *others))
        return " ".join(explanation(answer))

    assert "Tied with it in memory: near" in told_about("memory", near, faster)
    assert "All others need significantly more memory." in told_about("memory", faster)
    unlikely = another("unlikely", 0.1, 1.0, 0.01)
    assert "slower or are less likely to fit." in told_about("throughput", unlikely)


def test_too_little_gets_a_sentence(many: list[Observation], calibration: CpuCalibration) -> None:
    with pytest.raises(UsageError, match="4 measured cells on CPU cores are too few"):
        calibrate_cells(many[:4])
    reasons = Counter({"3 devices do not divide": 2})
    with pytest.raises(UsageError, match="no strategy can run s: 3 devices do not divide"):
        rank_variants("s", [], calibration, 8, 10**9, "throughput", reasons)


SPEEDS = {
    ("single", 1): 100.0,
    ("ddp", 1): 98.0,
    ("ddp", 2): 170.0,
    ("fsdp2", 2): 120.0,
    ("zero_redundancy", 2): 140.0,
    ("tensor", 2): 90.0,
    ("pipeline", 2): 150.0,
}
"""Samples per second by strategy and ranks."""
WRAPPERS_OF_DDP = ("ddp", "accelerate", "trainer")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Results folder with two small workloads, the second twice as fast."""
    rows = []
    for workload, times in (("llama-nano", 1.0), ("gpt2-nano", 2.0)):
        for (strategy, devices), speed in SPEEDS.items():
            parts = 4 if strategy == "pipeline" else 1
            cell = Cell(strategy=strategy, devices=devices, workload=workload, micro_batches=parts)
            speeds = [times * speed * share for share in (0.99, 1.0, 1.01)]
            rows += trial_rows(with_defaults(cell), speeds, peak_mib=20.0 / devices)
    results = tmp_path_factory.mktemp("here")
    stored(results, rows)
    return str(results)


@pytest.mark.filterwarnings("ignore:Former.deviation:DeprecationWarning")
def test_the_commands_answer_from_a_results_folder(folder: str, tmp_path: Path) -> None:
    files = ("--matrix", str(tmp_path / "open.yaml"), "--html", str(tmp_path / "plan.html"))
    here = ("--results", folder, "--json")
    answer = json.loads(told(predict, *here, *files, "--workload", "gpt2-nano"))
    by_label = {row["label"]: row for row in answer["candidates"]}
    # Wrappers of DDP were not measured, and are predicted to be about as fast.
    assert answer["candidates"][0]["label"] in WRAPPERS_OF_DDP
    assert by_label["ddp"]["measured"]
    assert by_label["ddp"]["samples_per_second"] == pytest.approx(340, rel=1e-4)
    assert not all(row["measured"] for row in answer["candidates"])
    assert answer["setting"].startswith("gpt2-nano in fp32 on 2 ranks, 8 samples of 64 tokens")
    chosen = [cell.strategy for cell in cells_of(str(tmp_path / "open.yaml"), [])]
    assert chosen[0] in WRAPPERS_OF_DDP
    assert "ddp" in chosen
    page = (tmp_path / "plan.html").read_text()
    assert "llama-nano" in page
    assert "measurement" in page
    unseen = json.loads(told(predict, *here, "--unseen", "--workload", "gpt2-nano"))
    assert not any(row["measured"] for row in unseen["candidates"])
    assert unseen["workloads"] == ["llama-nano"]

    scores = json.loads(told(validate, *here))
    parts = scores["each workload predicted from all others"]
    assert {part["part"] for part in parts["scores"]} == {"llama-nano", "gpt2-nano", "all"}
    assert all(part["known"] == part["cells"] for part in parts["scores"])
    assert {choice["best"] for choice in parts["first_choices"]} >= {"ddp", "single"}

    curves = json.loads(
        told(whatif, "ddp llama-nano*", "--results", folder, "--devices", "64", "--json")
    )
    points = {point["devices"]: point for point in curves["curves"][0]["points"]}
    assert list(points) == [1, 2, 4, 8, 16, 32, 64]
    assert points[2]["measured"] == pytest.approx(170, rel=1e-3)
    assert points[64]["measured"] is None
    assert curves["title"].startswith("llama-nano, weak scaling on one machine")
    widths = [points[n]["high"] / points[n]["low"] for n in (2, 4, 64)]
    assert widths == sorted(widths)
    assert widths[0] < widths[-1]


@pytest.mark.filterwarnings("ignore:Former.deviation:DeprecationWarning")
def test_a_measurement_answers_for_its_own_optimizer_and_compilation(tmp_path: Path) -> None:
    """The plan of each setting shows its cell, whichever was measured last; older records name no
    default options."""
    plain = with_defaults(Cell(strategy="ddp", devices=2, workload="llama-nano"))
    speeds = [
        (plain, 100.0),
        (plain.model_copy(update={"compile": "block"}), 200.0),
        (plain.model_copy(update={"optimizer": "sgd"}), 400.0),
        (plain.model_copy(update={"optimizer": "adamw_foreach", "defaults": {}}), 300.0),
    ]
    others = [
        with_defaults(Cell(strategy=name, devices=devices, workload="llama-nano"))
        for name, devices in SPEEDS
        if (name, devices) not in (("ddp", 2), ("pipeline", 2))
    ]
    rows = [row for cell in others for row in trial_rows(cell, [90.0, 91.0])]
    for cell, speed in speeds:
        rows += trial_rows(cell, [speed, speed])
    stored(tmp_path, rows)
    here = read_measurements([tmp_path])
    for cell, speed in speeds:
        variants, _ = variants_of(Setting.of(cell), here)
        seconds = {v.cell.label: v.observation.seconds for v in variants if v.observation}
        assert seconds[cell.label] == pytest.approx(cell.global_batch / speed)
    answer = json.loads(told(predict, "--results", str(tmp_path), "--json"))
    by_label = {row["label"]: row["samples_per_second"] for row in answer["candidates"]}
    assert by_label["ddp"] == pytest.approx(100.0)
    assert by_label["ddp(compile=block)"] == pytest.approx(200.0)


def test_a_cell_that_cannot_run_any_more_has_a_curve_with_its_reason(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable(*_: object) -> None:
        raise Unavailable("its library is not installed")

    monkeypatch.setattr(plan_request, "validate", unavailable)
    (curve,) = json.loads(told(whatif, "ddp llama-nano*", "--results", folder, "--json"))["curves"]
    assert curve["points"] == []
    assert "its library is not installed" in curve["end"]
    assert "its library is not installed" in told(whatif, "ddp llama-nano*", "--results", folder)


def test_curves_of_several_settings_have_full_names(folder: str, tmp_path: Path) -> None:
    options = ("--results", folder, "--devices", "4")
    html = ("--html", str(tmp_path / "curves.html"))
    document = json.loads(told(whatif, "ddp", *options, *html, "--json"))
    names = {curve["name"] for curve in document["curves"]}
    assert names == {f"ddp {name}-nano x2 fp32 batch 8" for name in ("llama", "gpt2")}
    assert len({curve["cell_id"] for curve in document["curves"]}) == 2
    page, text = (tmp_path / "curves.html").read_text(), told(whatif, "ddp", *options)
    for name in names:
        assert name in page
        assert name in text
    assert document["title"] == "Weak scaling on one machine with a core per device"


@pytest.mark.filterwarnings("ignore:Former.deviation:DeprecationWarning")
def test_a_link_of_any_kind_changes_a_curve(folder: str) -> None:
    """A measurement without a link says nothing about several nodes."""
    here = read_measurements([Path(folder)])
    calibration = plan_request.calibrated(here)
    cells = {(c.cell.strategy, c.cell.workload): c for c in plan_request.scalable_cells(here)}

    def points(link: Link | None) -> tuple[ScalingPoint, ...]:
        request = plan_request.ScalingRequest(2, True, link)
        return plan_request.scaled(cells["ddp", "llama-nano"], here, calibration, request).points

    one, two = points(None)
    alone, delayed = points(Link.of("1ms"))
    assert alone.measured == one.measured
    assert two.measured
    assert delayed.measured is None
    assert delayed.predicted < two.predicted
    assert points(Link.of("none"))[1].measured is None


def test_every_size_of_a_sweep_has_the_requested_ranks_per_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    swept: list[Setting] = []

    def planned(setting: Setting, *_: object) -> tuple[str, list[LocalVariant]]:
        swept.append(setting)
        return "", []

    monkeypatch.setattr(plan_request, "plan_setting", planned)
    request = plan_request.PlanRequest(devices=4, per_node=2, link="1gbit")
    setting = Setting.of(Cell(strategy="ddp", devices=4, nodes=2, links="1gbit"))
    calibration: Any = SimpleNamespace(workloads=())
    plan_request.sweep_settings(
        setting, request, LocalMeasurements("", 4, 10**9, (), {}), calibration
    )
    assert {s.devices: (s.nodes, s.links) for s in swept} == {
        1: (1, ""),
        2: (1, ""),
        4: (2, "1gbit"),
    }


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--results", "/nowhere"), "no runs in results folder '/nowhere'"),
        (("--workload", "nothing"), "unknown workload 'nothing'"),
        (("--link", "fast"), "--link 'fast': write a link as none, 1gbit"),
        (("--link", "1gbit", "--devices", "3", "--per-node", "2"), "at least two nodes"),
        (("--goal", "fun"), "give throughput or memory"),
    ],
)
def test_bad_questions_get_one_sentence(options: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        ask(predict, *options)


@pytest.mark.parametrize(
    "option",
    [
        ("--calibration", "default"),
        ("--model", "1B=llama-1b"),
        ("--device", "a100-80gb"),
        ("--per-node", "4"),
        ("--link", "nvlink"),
        ("--seq", "2048"),
        ("--data", "runs.csv"),
        ("--fit", "mine.yaml"),
    ],
)
def test_options_for_a_cluster_do_not_go_with_this_machine(option: tuple[str, str]) -> None:
    with pytest.raises(UsageError, match=f"leave out {option[0]}$"):
        ask(validate, "--results", "results", *option)
