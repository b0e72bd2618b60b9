"""Measures what a heat adds to a cell's throughput: DDP against itself, launched in several ways.

`.venv/bin/python -m docs.studies.heat_launchers [SECONDS]` runs heats of DDP (llama-mini, batch 8,
64 tokens, two ranks), which the fork server starts twice, and `spawn`, torchrun and mpirun once
each, in shuffled order. Prints each way's log throughput over the mean of the fork server's, and
the standard deviation between ways beyond noise, with its 95% upper bound: the squared differences
of the ways' means, over the variance that noise and this deviation give them, are chi-square.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.stats import chi2

from harness.analysis.race import heat_of
from harness.cell.cell import Cell
from harness.launch.interleaved import InterleavedLauncher, Launch
from harness.run.metrics import timed_seconds
from harness.worker.spec import STEPS_IN_A_TURN
from harness.workloads import make_workload, prepare_data

TURNS = 19
"""Turns of a trial, as in `full`."""
CELL = Cell(
    strategy="ddp", workload="llama-mini", devices=2, global_batch=8, sequence_length=64,
    warmup_steps=3, timed_steps=10,
)  # fmt: skip


def by_torchrun(scratch: Path) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


def by_mpirun(scratch: Path) -> list[str]:
    unbound = ("--oversubscribe", "--bind-to", "none")
    return ["mpirun", "--allow-run-as-root", *unbound, "-np", "2", sys.executable]


WAYS: dict[str, tuple[str, Callable[[Path], list[str]] | None]] = {
    "fork server": ("elastic", None),
    "fork server again": ("elastic", None),
    "spawn": ("spawn", None),
    "torchrun": ("elastic", by_torchrun),
    "mpirun": ("elastic", by_mpirun),
}


def heat(launcher: InterleavedLauncher, ways: list[str]) -> dict[str, float]:
    """Returns each way's log throughput; empty if a trial failed."""
    data = prepare_data(CELL.data, make_workload(CELL.workload), CELL.sequence_length)
    launches = []
    for way in ways:
        option, command = WAYS[way]
        more: Any = {"timed_steps": TURNS * STEPS_IN_A_TURN}
        more |= {"command": command} if command else {}
        launches.append(Launch(CELL.model_copy(update={"launcher": option}), data, 2, more))
    rates = {}
    for way, outcome in zip(ways, launcher.together(launches), strict=True):
        if outcome.status != "ok":
            print(f"{way}: {outcome.status}: {outcome.reason}", flush=True)
            return {}
        seconds = timed_seconds([rank.steps for rank in outcome.trained])
        turns = np.array(seconds).reshape(-1, STEPS_IN_A_TURN).mean(axis=1)
        rates[way] = [1 / turn for turn in turns]
    return heat_of(rates)


def between_ways(values: np.ndarray[Any, Any]) -> tuple[float, float]:
    """Returns the standard deviation between the columns' means beyond noise, and its upper bound.
    `values`: log throughput by heat and way."""
    heats, ways = values.shape
    centred = values - values.mean(axis=1, keepdims=True)
    means = centred.mean(axis=0)
    noise = float(((centred - means) ** 2).sum() / ((heats - 1) * (ways - 1)) / heats)
    squares = float((means**2).sum())

    def excess(deviation: float, quantile: float) -> float:
        return squares / (noise + deviation**2) - quantile

    seen = max(0.0, squares / (ways - 1) - noise) ** 0.5
    least = float(chi2.ppf(0.05, ways - 1))
    return seen, float(brentq(excess, 0.0, 1.0, args=(least,))) if squares > least * noise else 0.0


def main(seconds: str = "480") -> None:
    chance, end, heats = random.Random(1), time.monotonic() + float(seconds), []
    with contextlib.closing(InterleavedLauncher([], len(WAYS))) as launcher:
        while time.monotonic() < end:
            if found := heat(launcher, chance.sample(list(WAYS), len(WAYS))):
                heats.append([found[way] for way in WAYS])
                print(" ".join(f"{value - heats[-1][0]:+.4f}" for value in heats[-1]), flush=True)
    values = np.array(heats)
    base = values[:, :2].mean(axis=1)
    for number, way in enumerate(WAYS):
        over = values[:, number] - base
        error = over.std(ddof=1) / len(over) ** 0.5
        print(f"{way}: {over.mean():+.2%} ± {error:.2%}, spread {over.std(ddof=1):.2%}")
    print("{:.2%} between ways, at most {:.2%}".format(*between_ways(values)))
    print("without the fork server: {:.2%}, {:.2%}".format(*between_ways(values[:, 2:])))


if __name__ == "__main__":
    from docs.studies import heat_launchers  # so that launchers' processes find its functions

    heat_launchers.main(*sys.argv[1:])
