"""Mistakes in calls of bench.run are one sentence."""

from __future__ import annotations

import inspect

import pytest

import bench
from bench.cli.run import run as command_run
from bench.run_options import command_line
from harness.cell.errors import UsageError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either cells or a matrix"),
        ({"matrix": "smoke", "trials": 0}, "trials 0"),
        ({"matrix": "smoke", "timed_seconds": -1.0}, "timed_seconds -1.0"),
        ({"matrix": "smoke", "time_budget_seconds": float("nan")}, "time_budget_seconds nan"),
    ],
)
def test_mistakes(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        bench.run(**options)  # type: ignore[arg-type]


def test_python_and_the_command_take_the_same_options() -> None:
    """An empty list of the command line stands for no patterns and no settings."""
    python, shell = (dict(inspect.signature(run).parameters) for run in (bench.run, command_run))
    assert python.keys() - shell.keys() == {"cells", "listener"}
    for name in python.keys() & shell.keys() - {"only", "skip", "settings"}:
        assert python[name].default == shell[name].default, name


def test_a_job_is_given_the_options_that_are_set() -> None:
    given = command_line(
        only=["ddp", "fsdp2"], skip=None, settings=["batch=16"], trials=3, report=False
    )
    assert given == [
        "--only",
        "ddp",
        "--only",
        "fsdp2",
        "--set",
        "batch=16",
        "--trials",
        "3",
        "--no-report",
    ]
    assert command_line(only=None, trials=None, report=True) == []
