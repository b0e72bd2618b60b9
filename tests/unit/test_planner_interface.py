"""The planner's Python functions: what they take, return and refuse."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

import pytest

from bench import api
from bench.cli.fits import fits
from bench.cli.plan import plan
from harness.cell.errors import UsageError
from harness.planner.cluster.question import PlannedLayout
from harness.planner.tools import FIELDS, field_named

SMALL = {
    "gpus": "2 x h100",
    "batch": 8,
    "sequence_length": 1024,
    "link": "nvlink",
    "precision": "fp32",
}


def test_a_plan_considers_only_given_layouts() -> None:
    layouts = [PlannedLayout(data=2, accumulation=4), PlannedLayout(tensor=2, accumulation=8)]
    answer = api.plan("llama-1b", **SMALL, layouts=layouts)  # type: ignore[arg-type]
    assert answer.considered == 2
    assert {candidate.layout for candidate in answer.candidates} <= {*layouts}


@pytest.mark.parametrize(("command", "function"), [(plan, api.plan), (fits, api.fits)])
def test_a_function_takes_what_its_command_takes(
    command: Callable[..., None], function: Callable[..., object]
) -> None:
    """Files are written by commands alone. A function's `fields` take the names of options."""
    renamed = {"seq": "sequence_length", "host_memory": "host_memory_bytes"}
    options = {renamed.get(name, name) for name in inspect.signature(command).parameters}
    written = {"write_matrix", "export", "json_output", "settings"}
    taken = inspect.signature(function).parameters
    others = options - written - {*taken}
    assert not others or "fields" in taken
    assert all(field_named(name) in FIELDS for name in others)


@pytest.mark.parametrize("top", [0, -1])
def test_a_plan_of_no_layouts_is_refused(top: int) -> None:
    with pytest.raises(UsageError, match=f"top {top}: give the number of layouts"):
        api.plan("llama-1b", top=top)


def test_an_unknown_precision_is_named_as_in_python() -> None:
    for predict in (partial(api.plan, "llama-1b"), partial(api.fits, "llama-1b", "h100")):
        with pytest.raises(UsageError, match=r"^precision 'x': give one of fp32"):
            predict(precision="x")
