"""Ratios that benchmarks state, shown as one table at the end and kept with the benchmark's figures
(--benchmark-json)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from harness.analysis.stats import estimate, percentile, slowest
from harness.launch.launcher import Launcher
from harness.spec.cell import Cell
from harness.strategy.registry import strategies, validate
from harness.workloads import make_workload, prepare_data

Ratio = Callable[[str, Sequence[float], str], None]
_SAID: list[tuple[str, str, str]] = []


@pytest.fixture(scope="session")
def launcher(plugin: object) -> Launcher:
    """Holds what the strategies import, those of other packages (tests/plugin) too."""
    return Launcher(
        list(
            dict.fromkeys(
                p
                for one in strategies().values()
                for p in (*one.requires, *one.capabilities.preload)
                if find_spec(p.split(".")[0])
            )
        )
    )


def steps_of(
    launcher: Launcher,
    one: Cell,
    heard: Callable[[int, float], None] | None = None,
    timed: bool = False,
) -> list[float]:
    """Step times of a launch in seconds, all or the timed ones, the slowest rank's at each step."""
    workload = make_workload(one.workload)
    outcome = launcher.run(
        one,
        prepare_data(one.data, workload, one.sequence_length),
        validate(one, workload)[1].processes,
        on_progress=heard,
    )
    assert outcome.status == "ok", outcome.reason
    return slowest(
        [
            [s.step_seconds for s in rank.steps if s.phase == "timed" or not timed]
            for rank in outcome.trained
        ]
    )


def step_seconds(launcher: Launcher, one: Cell) -> float:
    """Median timed step of a launch."""
    return percentile(steps_of(launcher, one, timed=True), 0.5)


@pytest.fixture
def ratio(benchmark: BenchmarkFixture) -> Ratio:
    """States a ratio (or another figure) by one value per round: its median with the interval, and
    what it is to be."""

    def state(name: str, values: Sequence[float], wanted: str) -> None:
        found = estimate(values)
        said = f"{found.value:.3f}" + (
            "" if found.low is None else f"  [{found.low:.3f}, {found.high:.3f}]"
        )
        _SAID.append((name, said, wanted))
        benchmark.extra_info.setdefault("ratios", []).append(
            {
                "name": name,
                "median": found.value,
                "low": found.low,
                "high": found.high,
                "rounds": len(values),
                "wanted": wanted,
            }
        )

    return state


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _SAID:
        return
    terminalreporter.section(
        "ratios, measured side by side: median over rounds, 95 % interval, what is wanted"
    )
    wide = max(len(name) for name, _, _ in _SAID)
    for name, said, wanted in _SAID:
        terminalreporter.write_line(f"{name:<{wide}}  {said:<24}  {wanted}")
