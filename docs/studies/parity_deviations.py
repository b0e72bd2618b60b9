"""Largest deviations of correct strategies: four models, two seeds, two ranks.

`.venv/bin/python -m docs.studies.parity_deviations FOLDER` trains about 100 small cells and prints
the table of docs/studies/parity-deviations.md. An existing folder is only read.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from harness.cell.cell import Cell
from harness.cell.errors import Refused
from harness.launch.launcher import Launcher
from harness.parity.later import allowed_norm
from harness.parity.verdict import KINDS
from harness.record.plan import Plan
from harness.record.store import Store
from harness.run.references import declared
from harness.run.runner import ProgressListener, Runner
from harness.seam.registry import validate
from harness.workloads import make_workload

MODELS, SEEDS = ("llama-nano", "gpt2-nano", "mixtral-nano"), (0, 1)
STRATEGIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("ddp", {}),
    ("fsdp1", {}),
    ("fsdp2", {}),
    ("zero_redundancy", {}),
    ("horovod", {}),
    ("fairscale_oss", {}),
    ("deepspeed", {"stage": 3}),
    ("accelerate", {"engine": "ddp"}),
    ("trainer", {"engine": "ddp"}),
    ("distributed_config", {}),
    ("tensor", {}),
    ("pipeline", {}),
)
IN_BF16: tuple[tuple[str, dict[str, Any]], ...] = (
    ("ddp", {}),
    ("fsdp2", {}),
    ("deepspeed", {"stage": 2}),
    ("tensor", {}),
)
WITH_IMAGES = (("ddp", {}), ("sync_batch_norm", {}))
COLUMNS = {"elements": "element", "decays": "decay", "buffers": "buffer", "moments": "moment"}
"""Column of each kind of deviation, within `parity_max_NAME_deviation`."""


def cells() -> Iterator[Cell]:
    for model in (*MODELS, "resnet-micro"):
        images = model.startswith("resnet")
        for precision, strategies in (("fp32", STRATEGIES), ("bf16", IN_BF16)):
            if images and precision == "bf16":
                continue
            for strategy, options in WITH_IMAGES if images else strategies:
                for seed in SEEDS:
                    cell = Cell(
                        strategy=strategy,
                        options=options,
                        workload=model,
                        seed=seed,
                        precision=precision,
                        devices=2,
                        micro_batches=1 if images else 2,
                        sequence_length=32,
                        warmup_steps=6,
                        timed_steps=5,
                        parity_steps=11,
                        clip_norm=0.6,
                    )
                    try:
                        validate(cell, make_workload(model))
                    except Refused:
                        continue
                    yield cell


def train(folder: Path) -> None:
    plan = Plan.new("parity deviations", list(cells()), 1, [])
    runner = Runner(Store(folder), plan, launcher=Launcher)
    runner.begin()
    runner.run(ProgressListener())


def nearest(found: pd.Series, limits: pd.Series) -> str:
    """Returns deviation, limit and headroom of the trial nearest to its limit, as table cells."""
    shares = (found / limits).dropna()
    if shares.empty:
        return "| | |"
    worst = shares.idxmax()
    headroom = limits[worst] / found[worst] if found[worst] else math.inf
    return f"{found[worst]:.1e} | {limits[worst]:.1e} | {headroom:.1f} |"


def comparisons(trials: pd.DataFrame, precision: str) -> dict[str, str]:
    """Returns table cells by row. Limits exclude rounding's allowance, except the update's."""
    declared_updates = {cell.id: declared(cell).update for cell in cells()}
    base = trials.cell_id.map(declared_updates)
    loss, update = trials.parity_loss_tolerance, trials.parity_update_tolerance
    norms = pd.Series(
        [allowed_norm(a, b) for a, b in zip(loss, update, strict=True)], index=trials.index
    )
    kinds = {
        COLUMNS[kind.attribute]: (
            trials[f"parity_max_{COLUMNS[kind.attribute]}_deviation"],
            kind.times_update(precision) * base,
        )
        for kind in KINDS
        if kind.attribute in COLUMNS
    }
    rows = {
        "loss": (trials.parity_max_loss_deviation, loss),
        "update": (trials.parity_max_update_deviation, update),
        **kinds,
        "gradient norm": (trials.parity_max_norm_deviation, norms),
    }
    return {name: nearest(*of_row) for name, of_row in rows.items()}


def main() -> int:
    folder = Path(sys.argv[1])
    if not folder.exists():
        train(folder)
    trials = Store(folder).load().trials
    wrong = trials[trials.status != "ok"]
    print(f"{len(trials)} cells, {len(wrong)} not ok")
    for _, trial in wrong.iterrows():
        print(f"- {trial.strategy} {trial.workload} seed {trial.seed}: {trial.reason}")
    right = trials[trials.status == "ok"]
    fp32, bf16 = (comparisons(right[right.precision == p], p) for p in ("fp32", "bf16"))
    print("\n| what | fp32 | limit | headroom | bf16 | limit | headroom |")
    print("|---|---|---|---|---|---|---|")
    for name, cells_of_row in fp32.items():
        print(f"| {name} | {cells_of_row} {bf16[name]}")
    return int(bool(len(wrong)))


if __name__ == "__main__":
    sys.exit(main())
