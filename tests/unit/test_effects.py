"""Effects of turning on one feature, alone and over all combinations with others."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest

from bench.expand import expand
from bench.matrix import Host, read_matrix
from harness.analysis.cell_result import CellResult, Memory, Placement, Speed
from harness.analysis.effects import _mean_ratio, effects_of
from harness.analysis.ranking import compare
from harness.analysis.stats import CONFIDENCE, LogEstimate
from harness.cell.cell import Cell


def result(rate: float, peak: int, workload: str = "llama-micro", **axes: Any) -> CellResult:
    cell = Cell(strategy="ddp", devices=2, workload=workload, **axes)
    return CellResult(
        "run",
        cell,
        cell.id,
        "ok",
        ranked=True,
        trials=2,
        placement=Placement(wraps_ddp="torchrun"),
        speed=Speed(
            samples_per_second=rate, log_throughput=LogEstimate(math.log(rate), 0.01, 20, 2)
        ),
        memory=Memory(peak_memory_bytes=peak),
    )


def combinations() -> list[CellResult]:
    """bf16 is twice as fast; recomputation takes 25% more time in fp32 and 50% more in bf16."""
    slower = {"fp32": 1.25, "bf16": 1.5}
    return [
        result(
            100 * (2 if precision == "bf16" else 1) / (slower[precision] if again == "full" else 1),
            1000 // (2 if again == "full" else 1),
            precision=precision,
            recompute=again,
        )
        for precision, again in itertools.product(("fp32", "bf16"), ("none", "full"))
    ]


def test_the_level_of_a_precision_is_common_to_its_pairs() -> None:
    """Heats of each precision are connected, and their level is less precise than their cells."""
    leveled = [
        replace(cell, speed=replace(cell.speed, log_throughput=estimate))
        for cell in combinations()
        if (speed := cell.speed.log_throughput)
        for part in [int(cell.cell.precision == "bf16")]
        for estimate in [replace(speed, level_error=0.05, part=part)]
    ]
    before, after = (effects_of(cells)[0].effects for cells in (combinations(), leveled))
    for old, new in zip(before, after, strict=True):
        assert old.alone is not None
        assert new.alone is not None
        pairs = [(old.alone, new.alone), (old.together, new.together)]
        if new.axis == "recompute":
            assert all(narrow == wide for narrow, wide in pairs)
        else:
            widths = [(narrow.precision, wide.precision) for narrow, wide in pairs]
            assert all(wide and narrow and wide > narrow + 0.05 for narrow, wide in widths)


def test_each_effect_is_measured_alone_and_on_average() -> None:
    (effects,) = effects_of([*combinations(), result(110, 900, "llama-micro+float8")])
    by_name = {effect.value: effect for effect in effects.effects}
    assert list(by_name) == ["precision=bf16", "float8", "recompute=full"], "the best first"
    again = by_name["recompute=full"]
    assert again.pairs == 2
    assert again.alone is not None
    assert again.alone.ratio == pytest.approx(1 / 1.25)
    assert again.together.ratio == pytest.approx(1 / math.sqrt(1.25 * 1.5))
    assert again.alone_memory == again.together_memory == pytest.approx(0.5)
    alone = again.alone
    assert alone.low is not None
    assert alone.high is not None
    together = again.together
    assert together.low is not None
    assert together.high is not None
    assert together.high / together.low > alone.high / alone.low, "effects differ by combination"
    assert by_name["float8"].alone is not None
    assert by_name["float8"].alone.ratio == pytest.approx(1.1)


def test_the_interval_of_two_combinations_has_both_in_it() -> None:
    """From scatter alone, with one degree of freedom, the interval would span a factor of ten."""
    (effects,) = effects_of(combinations())
    (again,) = (effect for effect in effects.effects if effect.value == "recompute=full")
    assert again.pairs == 2
    assert again.together.low is not None
    assert again.together.high is not None
    assert 0.6 < again.together.low < 1 / 1.5
    assert 1 / 1.25 < again.together.high < 0.9


def test_one_pair_has_the_same_interval_alone_and_on_average() -> None:
    """The control's allowance counts in both."""
    pair = [result(rate, 1000, precision=name) for name, rate in (("fp32", 100), ("bf16", 101))]
    pair = [
        replace(cell, speed=replace(cell.speed, log_throughput=replace(speed, allowance=0.006)))
        for cell in pair
        if (speed := cell.speed.log_throughput)
    ]
    mean = _mean_ratio([(pair[1], pair[0])])
    alone = compare(pair[1], pair[0], CONFIDENCE)
    assert mean is not None
    assert alone is not None
    assert (mean.low, mean.high) == pytest.approx((alone.low, alone.high))


@pytest.mark.parametrize("chosen", [slice(0, 1), slice(0, 2), slice(0, 3)])
def test_without_combinations_there_is_no_section(chosen: slice) -> None:
    """Features that were never combined are left to the table of all cells."""
    assert effects_of(combinations()[chosen]) == []


@pytest.mark.thorough
def test_tune_leaves_out_what_does_not_fit() -> None:
    matrix = read_matrix("tune")
    all_there = expand(matrix, Host("cpu", 2, 2**34))
    assert len(all_there.cells) > 40
    assert {cell.optimizer for cell in all_there.cells} >= {"muon", "adamw_8bit", "adamw_fused"}
    assert not [left for left in all_there.left_out if "GiB" in left.reason]
    little = expand(matrix, Host("cpu", 2, 2**31))
    assert not little.cells
    assert "per device by its formulas, but a device has 1.0 GiB" in little.left_out[0].reason
