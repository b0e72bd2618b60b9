"""Each claim of a training guide is a sentence with the figures of a run's records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.cell.cell import Cell
from reports.claims import claims
from reports.run_report import ran
from tests.unit.made_results import MIB, searched, states, stored, trial_rows


def sentence(folder: Path, rows: list[dict[str, Any]], **run: Any) -> str:
    """Returns the only claim that a run with these trials has figures for."""
    (text,) = claims(ran(stored(folder, rows, **run))).values()
    return text


def test_a_ring_sends_less_than_twice_the_gradients_on_any_number_of_ranks(tmp_path: Path) -> None:
    rows = []
    for name, over_ring in (("ring", 1.0), ("sharded", 1.5)):
        for devices in (1, 2, 4):
            cell = Cell(strategy=name, devices=devices, regime="weak", global_batch=8 * devices)
            sent = over_ring * 2 * (devices - 1) / devices * 4 * 1000
            rows += trial_rows(
                cell,
                [10.0 * devices * 0.9 ** (devices - 1)],
                trained_parameters=1000,
                sent_bytes_per_step=[sent] * devices,
                oversubscribed=devices > 2,
            )
    assert sentence(tmp_path, rows) == (
        "From 2 to 4 ranks, a rank sends 1.00 to 1.50 times the gradients under ring, at most 2%"
        " more than a ring's 2(N − 1)/N; up to 1.50 times that under sharded. With equal batches"
        " per device, ring keeps 90% of one device's throughput per device on 2."
    )


def test_states_of_zero_are_compared_with_formula_and_rehearsal(tmp_path: Path) -> None:
    rows, rehearsed = [], {}
    for stage, sizes in {0: (4, 0, 8, 4), 3: (1, 0, 2, 1)}.items():
        for devices in (1, 4):
            cell = Cell(strategy="zero", options={"stage": stage}, devices=devices)
            kept = sizes if devices == 4 else (4, 0, 8, 4)
            rows += trial_rows(cell, [1.0], **states(*[kept] * devices, formula=kept))
            rehearsed[cell.id] = int(sum(kept) * MIB * 1.01)
    plan = {"cells": [], "trials": 1, "left_out": [], "rehearsed": rehearsed}
    assert sentence(tmp_path, rows, plan=json.dumps(plan)) == (
        "On 4 ranks in fp32, a rank keeps 16.0 MiB under zero(stage=0), and 1/4.00 of that under"
        " zero(stage=3). Over 4 cells, the formula is at most 0% off, and the rehearsal 1%."
    )


def test_a_search_says_how_much_more_the_last_of_a_chain_trains(tmp_path: Path) -> None:
    (text,) = claims(ran(searched(tmp_path))).values()
    assert text == (
        "Within 1.00 MiB per rank, more trains 0.0M parameters and less 0.0M parameters, a ratio of"
        " 0.667."
    )


def test_the_first_gpu_of_one_process_is_compared_with_the_others(tmp_path: Path) -> None:
    cell = Cell(strategy="threads", devices=3, device="cuda")
    peaks = [300 * MIB, 100 * MIB, 150 * MIB]
    rows = trial_rows(cell, [1.0], processes=1, peak_memory_bytes_by_rank=peaks)
    assert sentence(tmp_path, rows) == (
        "Under threads llama-mini x3 fp32 batch 8, the first GPU needs 300 MiB at its peak, 2.00"
        " times as much as any other."
    )


def test_a_bubble_is_told_for_the_fewest_and_the_most_micro_batches(tmp_path: Path) -> None:
    rows = []
    for schedule in ("gpipe", "zbv"):
        for count, share in ((2, 0.4), (8, 0.2), (4, 0.3)):
            cell = Cell(
                strategy="pipe", options={"schedule": schedule}, devices=2, micro_batches=count
            )
            rows += trial_rows(cell, [1.0], pipeline_parallel=2, bubble_fraction=share)
    assert sentence(tmp_path, rows) == (
        "pipe(schedule=gpipe): 40% with 2 micro-batches (theory 33%) and 20% with 8 (theory 11%)."
        " pipe(schedule=zbv): 40% with 2 micro-batches (no closed form) and 20% with 8 (theory"
        " 2%)."
    )


def test_losses_after_equal_samples_are_told_by_rule(tmp_path: Path) -> None:
    rows = []
    for batch, rate, loss in (
        (4, 1e-3, 2.0),
        (16, 1e-3, 3.0),
        (16, 2e-3, 2.5),
        (16, 4e-3, 2.25),
        (8, 1e-3, 9.0),
    ):
        cell = Cell(strategy="ddp", devices=2, global_batch=batch, learning_rate=rate)
        steps = 1000 if batch == 8 else 1024 // batch
        rows += trial_rows(cell, [1.0], losses=[9.0] * (steps // 2) + [loss] * (steps // 2))
    assert sentence(tmp_path, rows) == (
        "After 1,024 samples, the loss of ddp is 2.00 with batch 4; with batch 16 it is 3.00 by"
        " the same rate, 2.50 by the square-root rule and 2.25 by the linear rule."
    )


def test_norms_in_fp16_are_those_of_unscaled_gradients(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    for strategy, norms in (("ddp", [2.0, 1.5]), ("amp", [1.0])):
        cell = Cell(strategy=strategy, devices=2, precision="fp16", clip_norm=0.6)
        rows += trial_rows(cell, [1.0], gradient_norms=norms)
    assert sentence(tmp_path, rows) == (
        "In fp16 with clipping at 0.6, training is that of one process under amp and ddp."
        " Gradients are unscaled before they are clipped: their norms are 1.00 to 2.00."
    )


def test_a_config_file_is_told_with_its_parity(tmp_path: Path) -> None:
    cell = Cell(strategy="front", options={"config_file": True, "engine": "zero2"}, devices=2)
    assert sentence(tmp_path, trial_rows(cell, [1.0])) == (
        "Started by the library's own command: front(config_file=true, engine=zero2) (exact)."
    )


def test_a_run_without_these_figures_claims_nothing(tmp_path: Path) -> None:
    rows = trial_rows(Cell(strategy="ddp", devices=2), [1.0])
    assert claims(ran(stored(tmp_path, rows))) == {}
