"""Throughput estimates over a run: the control, moderated spreads, comparison with the best."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections.abc import Sequence

import numpy as np
import pytest

from bench.select import baseline_choice
from harness.analysis.answer import answer, nothing_to_choose, with_verdicts
from harness.analysis.cell_result import CellResult
from harness.analysis.estimates import NONE, Spread, Window, adjustment, moderated, prior
from harness.analysis.ranking import (
    against_best,
    baseline_of,
    compare,
    confident_that_beaten,
    gains,
    half_widths,
)
from harness.analysis.stats import Comparison, LogEstimate, between_runs, ratio
from harness.analysis.summary import cell_results
from harness.cell.cell import Cell
from tests.unit.made_results import trial_rows
from tests.unit.stored_trials import frame_of


@pytest.mark.parametrize(
    ("comparisons", "two_sided", "value"),
    [(1, False, 1.65), (2, False, 1.92), (5, False, 2.23), (1, True, 1.96), (5, True, 2.51)],
)
def test_critical_values_are_those_of_dunnetts_table(
    comparisons: int, two_sided: bool, value: float
) -> None:
    """Spreads are equal and known."""
    cell = LogEstimate(0.0, 0.01, 1e6, 3)
    widths = half_widths(cell, [cell] * comparisons, two_sided)
    assert [width / math.hypot(0.01, 0.01) for width in widths] == pytest.approx(
        [value] * comparisons, abs=0.025
    )


def test_a_coarse_cell_does_not_widen_the_intervals_of_others() -> None:
    """The coarse cell has one trial and two degrees of freedom, so only its interval is wide."""
    sharp, coarse = LogEstimate(0.0, 0.01, 50, 50), LogEstimate(-0.2, 0.03, 2, 1)
    alone = half_widths(sharp, [sharp] * 20, two_sided=True)[0]
    *others, widest = half_widths(sharp, [*[sharp] * 20, coarse], two_sided=True)
    assert others == pytest.approx([alone] * 20, rel=0.03)
    assert widest > 5 * alone


def test_balanced_intervals_hold_together() -> None:
    """Coverage is at least 95%, since each pair uses the fewer degrees of freedom of the two."""
    chance, runs, held = np.random.default_rng(2), 400, 0
    degrees = [30, *[2] * 10, *[4] * 10, *[30] * 10]
    for _ in range(runs):
        baseline, *others = (
            LogEstimate(
                float(chance.normal(0.0, 0.01)),
                float(0.01 * np.sqrt(chance.chisquare(of) / of)),
                of,
                3,
            )
            for of in degrees
        )
        intervals = [(gain.low or 0.0, gain.high or 0.0) for gain in gains(baseline, others)]
        held += all(low <= 1 <= high for low, high in intervals)
    assert 0.93 <= held / runs <= 0.995


def equal_cells(chance: np.random.Generator, cells: int = 53) -> list[LogEstimate]:
    """Simulates equal cells of three trials each. Their variances differ and are moderated as if
    their distribution were known."""
    degrees, trials = 8, 3
    variances = 0.03**2 * degrees / chance.chisquare(degrees, cells)
    own = variances * chance.chisquare(trials - 1, cells) / (trials - 1)
    common = 0.03**2
    moderated_ = (degrees * common + (trials - 1) * own) / (degrees + trials - 1)
    means = chance.normal(0, np.sqrt(variances / trials))
    errors = np.sqrt(moderated_ / trials)
    return [
        LogEstimate(float(mean), float(error), degrees + trials - 1, trials)
        for mean, error in zip(means, errors, strict=True)
    ]


def test_the_set_contains_the_best_of_many_equal_cells() -> None:
    """Any equal cell may be called the best, here the first; docs/studies/power.py makes 20,000."""
    chance, held, runs = np.random.default_rng(1), 0, 600
    for _ in range(runs):
        first, *others = equal_cells(chance)
        held += confident_that_beaten(first, others) < 0.95
    assert held / runs >= 0.93


def test_a_lower_bound_uses_the_critical_value_of_the_candidate() -> None:
    """The candidate's wide spread correlates its differences, which lowers the critical value."""
    candidate, second = LogEstimate(0.5, 0.05, 20, 3), LogEstimate(0.0, 0.01, 20, 9)
    rest = [LogEstimate(-1.0, 0.01, 20, 9)] * 8
    low = against_best([candidate, second, *rest])[1].low
    half = half_widths(candidate, [second, *rest])[0]
    assert half < half_widths(second, [candidate, *rest])[0] - 0.1 * math.hypot(0.05, 0.01)
    assert math.log(low) == pytest.approx(-0.5 - half, abs=1e-3)


def test_gains_hold_together_for_a_cell_that_was_chosen() -> None:
    """Among 20 cells as fast as the baseline, the best-looking one is seldom called faster."""
    chance, alarms, runs = random.Random(8), 0, 200
    for _ in range(runs):
        baseline, *others = (LogEstimate(chance.gauss(0, 0.01), 0.01, 1e4, 3) for _ in range(21))
        alarms += any(gain.verdict == "faster" for gain in gains(baseline, others))
    assert alarms / runs <= 0.05


def test_between_runs_the_common_control_takes_out_drift() -> None:
    """The machine is 10% slower in the second run, but the cell itself is not."""
    first = LogEstimate(0.0, 0.005, 20, 10, control=math.log(0.1))
    second = LogEstimate(-0.1, 0.005, 20, 10, control=math.log(0.1) + 0.1)
    assert between_runs(second, first).ratio == pytest.approx(1.0)
    other = between_runs(second, first, same_control=False)
    assert other.low is not None
    assert other.high is not None
    assert other.low < math.exp(-0.1) < 1 < other.high
    slowed = dataclasses.replace(second, mean=-0.14, control=math.log(0.1) + 0.1)
    still = dataclasses.replace(first, mean=0.0)
    assert between_runs(slowed, still).ratio == pytest.approx(math.exp(-0.04))
    assert (
        between_runs(dataclasses.replace(slowed, mean=-0.04, control=first.control), still).verdict
        == "slower"
    )


def test_a_cell_that_is_not_adjusted_may_follow_the_machine() -> None:
    """If a cell waits for a disk, a slower machine explains up to its whole slowdown."""
    first = LogEstimate(0.0, 0.01, 20, 10, control=math.log(0.1), adjusted=False)
    slow_machine = math.log(0.1) + 0.3

    def found(mean: float) -> Comparison:
        later = dataclasses.replace(first, mean=mean, control=slow_machine)
        return between_runs(later, first)

    assert [found(mean).verdict for mean in (0.0, -0.15, -0.3)] == ["no difference seen"] * 3
    assert found(-0.15).ratio == pytest.approx(math.exp(-0.15))
    assert found(-0.7).verdict == "slower"
    assert found(0.2).verdict == "faster"


def test_best_is_in_the_set_and_all_distances_hold_together() -> None:
    noise, true, launches = random.Random(1), [0.0, -0.01, -0.02, -0.05, -0.3], 4
    best_missed = broken = 0
    for _ in range(150):
        cells = []
        spreads = []
        for mean in true:
            values = [noise.gauss(mean, 0.03) for _ in range(launches)]
            cells.append(statistics.fmean(values))
            spreads.append(Spread(statistics.variance(values), launches - 1))
        common = moderated([Spread(statistics.fmean(s.variance for s in spreads), 15)])[0]
        error = math.sqrt(common.variance / launches)
        bounds = against_best([LogEstimate(mean, error, 15, launches) for mean in cells])
        best_missed += not bounds[0].may_be_best
        others = [max(o for i, o in enumerate(true) if i != own) for own in range(len(true))]
        broken += any(
            not bound.low * 0.9999 <= math.exp(own - other) <= bound.high * 1.0001
            for bound, own, other in zip(bounds, true, others, strict=True)
            if own < 0 or bound.may_be_best
        )
    assert best_missed <= 12  # 5%, plus chance
    assert broken <= 15


def test_prior_of_variances_is_found_again() -> None:
    """Variances scatter around 4e-4 with 6 degrees of freedom; each is estimated with 2."""
    chance, cells = random.Random(2), []
    for _ in range(3000):
        variance = 6 * 4e-4 / chance.gammavariate(3, 2)
        cells.append(Spread(variance * chance.gammavariate(1, 2) / 2, 2))
    common = prior(cells)
    assert common is not None
    assert common.degrees == pytest.approx(6, rel=0.2)
    assert common.variance == pytest.approx(4e-4, rel=0.1)
    narrowed = moderated(cells)[0]
    assert narrowed.degrees == common.degrees + 2


def test_prior_follows_what_a_launch_averages() -> None:
    """Cells with more steps have smaller variances; one degree of freedom per cell shows this."""
    chance, cells = random.Random(5), []
    for number in range(600):
        averaged = (5.0, 20.0, 80.0)[number % 3]
        variance = 8 * (0.04 / averaged) / chance.gammavariate(4, 2)
        cells.append(Spread(variance * chance.gammavariate(0.5, 2), 1, averaged))
    common = prior(cells)
    assert common is not None
    assert common.power == pytest.approx(-1, abs=0.2)
    assert common.degrees == pytest.approx(8, rel=0.5)
    for cell in cells[:3]:
        assert common.of(cell) == pytest.approx(0.04 / cell.averaged, rel=0.25)
    narrow, wide = (moderated(cells)[place] for place in (2, 0))
    assert narrow.degrees == wide.degrees == common.degrees + 1


def test_few_cells_are_pooled_and_one_launch_has_no_spread() -> None:
    for spread in moderated([Spread(1e-4, 2), Spread(3e-4, 2), Spread(0.0, 0)]):
        assert (spread.variance, spread.degrees) == (pytest.approx(2e-4), 4)
    assert moderated([Spread(0.0, 0)]) == [Spread(0.0, 0)]


def _trials(chance: random.Random, control: float) -> list[Window]:
    """Three trials on a machine whose speed changes by 15%, with a control that follows it."""
    speeds = [chance.gauss(0, 0.15) for _ in range(3)]
    return [Window(speed + chance.gauss(0, 0.01), control * speed) for speed in speeds]


def test_control_takes_out_what_moves_with_it() -> None:
    chance = random.Random(3)
    found = adjustment({str(number): _trials(chance, 1.0) for number in range(10)})
    assert found.spread_after < 0.12 * found.spread_before
    assert found.helps


def test_control_that_helps_nothing_is_left_out() -> None:
    chance = random.Random(4)
    assert not adjustment({str(number): _trials(chance, -0.5) for number in range(10)}).helps
    assert adjustment({"0": _trials(chance, 1.0)[:1]}) == NONE  # one trial


def _rows(cell: Cell, seconds: Sequence[float], controls: Sequence[float], **more: object) -> list:
    rows = []
    for trial, (step, control) in enumerate(zip(seconds, controls, strict=True)):
        (row,) = trial_rows(cell, [cell.global_batch / step])
        windows = [1.02, 0.98, 1.01, 0.99]
        row |= {"trial": trial, "window_step_seconds": [step * x for x in windows]}
        for name in ("window_control_seconds", "window_slowest_control_seconds"):
            row[name] = [control * x for x in windows]
        rows.append(row | more)
    return rows


@pytest.fixture
def cells() -> list[CellResult]:
    """The second round runs at half speed. Cell b is 10% slower than a, c is inexact and 25%
    faster, and d is oversubscribed."""
    slow = [1.0, 2.0, 1.0]
    controls = [0.1 * x for x in slow]
    rows = []
    for name, step, more in (
        ("a", 1.0, {}),
        ("b", 1.1, {"wraps_ddp": "torchrun", "peak_memory_bytes": 50 * 2**20}),
        ("c", 0.8, {"parity_verdict": "within tolerance", "parity_reason": "rounded gradients"}),
        ("d", 0.5, {"oversubscribed": True}),
    ):
        cell = Cell(strategy=name, devices=2)
        exact = [1.0, 1.004, 0.996]
        seconds = [step * s * e for s, e in zip(slow, exact, strict=True)]
        rows += _rows(cell, seconds, controls, **more)
    return cell_results(frame_of(rows))


def first_and_second(cells: Sequence[CellResult], behind: float, error: float) -> list[CellResult]:
    """Returns two copies of cell a with this log throughput difference and standard error."""
    pattern = next(cell for cell in cells if cell.cell.strategy == "a")
    return [
        dataclasses.replace(
            pattern.varied(strategy=name),
            cell_id=name,
            speed=dataclasses.replace(
                pattern.speed,
                log_throughput=LogEstimate(mean, error, 100, 3),
                samples_per_second=math.exp(mean),
            ),
        )
        for name, mean in (("first", 0.0), ("second", -behind))
    ]


def test_adjusted_figures_forget_the_slow_round(cells: list[CellResult]) -> None:
    by_name = {cell.cell.strategy: cell for cell in cells}
    a, b = by_name["a"], by_name["b"]
    assert a.speed.log_throughput
    assert b.speed.log_throughput
    assert a.speed.log_throughput.control is not None
    assert a.speed.samples_per_second == pytest.approx(8.0, rel=0.02)
    assert a.speed.samples_per_second_low
    assert a.speed.samples_per_second_high
    assert a.speed.samples_per_second_high / a.speed.samples_per_second_low < 1.03
    assert a.speed.raw_samples_per_second == pytest.approx(8.0, rel=0.01)  # the median
    ratio_of_both = compare(b, a)
    assert ratio_of_both is not None
    assert ratio_of_both.ratio == pytest.approx(1 / 1.1, rel=0.005)
    assert ratio_of_both.verdict == "slower"


@pytest.mark.slow
def test_crowded_cells_do_not_affect_others() -> None:
    """Noise of crowded cells changes neither the intervals nor the coefficients of other cells."""
    chance = random.Random(3)
    quiet = []
    for number in range(20):
        speeds = [math.exp(chance.gauss(0, 0.1)) for _ in range(3)]
        seconds = [speed * math.exp(chance.gauss(0, 0.02)) for speed in speeds]
        quiet += _rows(Cell(strategy=f"s{number}", devices=2), seconds, speeds)
    crowded = []
    for number in range(10):
        seconds = [math.exp(chance.gauss(0, 0.3)) for _ in range(3)]
        cell = Cell(strategy=f"c{number}", devices=2)
        crowded += _rows(cell, seconds, [1.0, 0.8, 1.1], oversubscribed=True)
    alone, together = (
        {c.cell_id: c.speed.log_throughput for c in cell_results(trials)}
        for name, rows in (("a", quiet), ("b", quiet + crowded))
        for trials in [frame_of(rows)]
    )
    assert len(together) == 30
    for cell_id, before in alone.items():
        assert before is not None
        assert dataclasses.astuple(together[cell_id]) == pytest.approx(dataclasses.astuple(before))


def test_answer_by_hand(cells: list[CellResult]) -> None:
    found = answer(cells)
    assert found is not None
    assert found.baseline is not None
    assert found.baseline.cell.strategy == "b"
    assert [(advice.role, advice.cell.cell.strategy) for advice in found.advice] == [
        ("Use", "a"),
        ("Faster at a price", "c"),
        ("Least memory", "b"),
    ]
    assert "rounded gradients" in found.advice[1].sentence
    gain = found.advice[0].cell.gain
    assert gain is not None
    assert gain.low is not None
    assert 1 < gain.low < gain.ratio == pytest.approx(1.1, rel=0.005)


@pytest.mark.parametrize(("error", "equal"), [(0.002, True), (0.02, False)])
def test_equality_needs_narrow_intervals(
    cells: list[CellResult], error: float, equal: bool
) -> None:
    """The cells differ by 0.2%; with wide intervals, being this close may be chance."""
    advised = answer(first_and_second(cells, 0.002, error))
    assert advised is not None
    sentence = advised.advice[0].sentence
    assert ": second." in sentence
    assert ("as fast within 2%" in sentence) == equal


def test_the_usual_choice_stays_until_something_is_known_to_beat_it(
    cells: list[CellResult],
) -> None:
    for behind, expected in ((0.01, "second"), (0.2, "first")):
        two = first_and_second(cells, behind, 0.01)
        usual = dataclasses.replace(two[0].relative, baseline="second")
        found = answer(with_verdicts([dataclasses.replace(c, relative=usual) for c in two]))
        assert found is not None
        assert found.advice[0].cell.cell_id == expected


@pytest.mark.parametrize(("behind", "expected"), [(0.04, "first"), (0.004, "second")])
def test_a_simpler_cell_is_used_only_if_it_is_as_fast(
    cells: list[CellResult], behind: float, expected: str
) -> None:
    """Both are known to be faster than the baseline, and either may be the fastest."""
    first, second = first_and_second(cells, behind, 0.02)
    usual = first_and_second(cells, 0.15, 0.001)[1]
    first = first.varied(options={"controller": "mpi"})
    three = [first, second, dataclasses.replace(usual.varied(strategy="usual"), cell_id="usual")]
    relative = dataclasses.replace(usual.relative, baseline="usual")
    advised = answer(with_verdicts([dataclasses.replace(c, relative=relative) for c in three]))
    assert advised is not None
    assert advised.advice[0].cell.cell_id == expected


def test_no_advice_where_there_is_nothing_to_choose(cells: list[CellResult]) -> None:
    two = first_and_second(cells, 0.2, 0.01)
    assert nothing_to_choose(two) == ""
    alone = [cell.varied(devices=1) for cell in two]
    shared = dataclasses.replace(two[0].placement, oversubscribed=True)
    crowded = [dataclasses.replace(cell, placement=shared) for cell in two]
    reasons = {nothing_to_choose(group) for group in (alone, crowded, two[:1], [])}
    assert len(reasons) == 4
    assert all(reasons)
    assert answer(alone) is None
    assert answer(crowded) is None


def test_the_baseline_with_more_trials_is_chosen() -> None:
    """Weak scaling on one device is the same training, so picking the faster one would be luck."""
    rows = _rows(Cell(strategy="single", regime="weak"), [0.9, 0.9], [0.1, 0.1])
    rows += _rows(Cell(strategy="single"), [1.0, 1.0, 1.0], [0.1, 0.1, 0.1])
    fastest, other = cell_results(frame_of(rows))
    assert (fastest.trials, other.trials) == (2, 3)
    assert baseline_of([fastest, other]) is other
    assert fastest.relative.baseline == other.cell_id


def test_every_cell_is_compared_with_the_baseline_that_was_chosen() -> None:
    rows = [
        row
        for name, seconds in (("single", 1.0), ("a", 0.5), ("b", 0.8))
        for row in _rows(Cell(strategy=name), [seconds, seconds * 1.01], [0.1, 0.1])
    ]
    trials = frame_of(rows)
    for chosen, expected in ((None, 2.0), (lambda cell: cell.strategy == "b", 1.6)):
        by_name = {cell.cell.strategy: cell for cell in cell_results(trials, chosen)}
        a, baseline = by_name["a"], by_name["b" if chosen else "single"]
        assert a.relative.baseline == baseline.cell_id
        assert a.relative.over_baseline == pytest.approx(expected)
        assert a.relative.over_baseline_low is not None
        assert a.relative.over_baseline_high is not None
        assert 0 < a.relative.over_baseline_low < expected < a.relative.over_baseline_high
        assert (baseline.relative.over_baseline, baseline.relative.over_baseline_low) == (1.0, None)


def test_the_chosen_baseline_is_the_plainest_cell_that_matches() -> None:
    """Trials are recorded in the order of cell ids, which are hashes."""
    sharded = Cell(strategy="fsdp2", devices=2)
    variants = [
        sharded.model_copy(update=update)
        for update in ({"options": {"prefetch": True}}, {"compile": "block"}, {"micro_batches": 4})
    ]
    rows = [row for cell in variants for row in _rows(cell, [0.5, 0.5, 0.5], [0.1] * 3)]
    rows += _rows(sharded, [1.0, 1.0], [0.1, 0.1])
    results = cell_results(frame_of(rows))
    for pattern, expected in (("fsdp2", sharded), ("fsdp2(*", variants[0])):
        chosen = baseline_choice(pattern, [sharded, *variants])
        baseline = baseline_of(sorted(results, key=lambda r: r.cell != variants[0]), chosen)
        assert baseline is not None
        assert baseline.cell == expected


def test_intervals_are_never_below_zero() -> None:
    wild = LogEstimate(math.log(100), 0.9, 1, 2).estimate()
    assert wild.low is not None
    assert 0 < wild.low < 100
    assert ratio(LogEstimate(0, 0.1, 0, 1), LogEstimate(0, 0.1, 4, 3)).low is None


def test_without_any_spread_the_first_of_equals_is_the_best() -> None:
    exact = [LogEstimate(mean, error, 4, 3) for mean, error in ((0, 0), (-1, 0), (-2, 0.1))]
    assert [bound.may_be_best for bound in against_best(exact)] == [True, False, False]
