"""Mistakes in calls of bench.run are one sentence."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import bench
from bench.cli.run import run as command_run
from bench.run_options import command_line
from harness.cell.errors import UsageError


def test_mistakes_are_refused_in_one_sentence() -> None:
    wrong = {"trials": 0, "timed_seconds": -1.0, "time_budget_seconds": float("nan")}
    with pytest.raises(UsageError, match="either cells, or a matrix"):
        bench.run()
    for name, value in wrong.items():
        with pytest.raises(UsageError, match=name):
            bench.run(matrix="smoke", **{name: value})  # type: ignore[arg-type]


def test_python_and_the_command_take_the_same_options() -> None:
    """An empty list of the command line stands for no patterns, scripts and settings."""
    python, shell = (dict(inspect.signature(run).parameters) for run in (bench.run, command_run))
    assert python.keys() - shell.keys() == {"cells", "listener"}
    for name in python.keys() & shell.keys() - {"only", "skip", "scripts", "settings"}:
        assert python[name].default == shell[name].default, name


def test_a_job_is_given_the_options_that_are_set() -> None:
    set_options: dict[str, Any] = {"only": ["ddp", "fsdp2"], "settings": ["batch=16"], "trials": 3}
    given = command_line(**set_options, skip=None, report=False)
    expected = "--only ddp --only fsdp2 --set batch=16 --trials 3 --no-report"
    assert given == expected.split()
    assert command_line(only=None, trials=None, report=True) == []
