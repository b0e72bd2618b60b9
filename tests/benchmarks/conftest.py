"""Ratios that benchmarks report: a table at the end, and extra_info in --benchmark-json."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from importlib.util import find_spec

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from harness.analysis.stats import estimate, percentile, slowest
from harness.cell.cell import Cell
from harness.launch.launcher import Launcher
from harness.seam.registry import strategies, validate
from harness.workloads import make_workload, prepare_data

Ratio = Callable[[str, Sequence[float], str], None]
_RATIOS: list[tuple[str, str, str]] = []


@pytest.fixture(scope="session")
def launcher(plugin: object) -> Launcher:
    """Launcher that preloads the packages of all strategies, including those of tests/plugin."""
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
    """Returns the slowest rank's time of each step in seconds; `timed`: only of timed steps."""
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
    """Returns the median timed step of a launch, in seconds."""
    return percentile(steps_of(launcher, one, timed=True), 0.5)


@pytest.fixture
def ratio(benchmark: BenchmarkFixture) -> Ratio:
    """Reports a ratio or another figure from a value per round: median, interval and target."""

    def state(name: str, values: Sequence[float], wanted: str) -> None:
        result = estimate(values)
        text = f"{result.value:.3f}" + (
            "" if result.low is None else f"  [{result.low:.3f}, {result.high:.3f}]"
        )
        _RATIOS.append((name, text, wanted))
        benchmark.extra_info.setdefault("ratios", []).append(
            {
                "name": name,
                "median": result.value,
                "low": result.low,
                "high": result.high,
                "rounds": len(values),
                "wanted": wanted,
            }
        )

    return state


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Function) -> Generator[None, object, object]:
    """Excludes an interrupted benchmark, whose missing rounds would keep pytest-benchmark from
    writing the figures of finished ones."""
    try:
        return (yield)
    except KeyboardInterrupt:
        item.funcargs["benchmark"].has_error = True
        raise


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _RATIOS:
        return
    terminalreporter.section(
        "ratios, measured side by side: median over rounds, 95% interval, target"
    )
    width = max(len(name) for name, _, _ in _RATIOS)
    for name, text, wanted in _RATIOS:
        terminalreporter.write_line(f"{name:<{width}}  {text:<24}  {wanted}")
