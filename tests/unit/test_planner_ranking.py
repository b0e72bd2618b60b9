"""The order of layouts in a plan."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.planner.cluster.calibration import Floats, load
from harness.planner.cluster.cluster_plan import plan
from harness.planner.cluster.hardware import cluster_of
from harness.planner.cluster.hf_config import parse_shape
from harness.planner.cluster.prediction import TRIED, predict, ranked
from harness.planner.cluster.question import ClusterQuestion, PlannedLayout, PlannedLayouts

CALIBRATION = load()
often = settings(max_examples=60)


def order(seconds: list[float], fits: list[float], half_width: float = 0.03) -> list[int]:
    count = len(seconds)
    memory_bytes = np.arange(count, dtype=float)
    rows = ranked(np.array(seconds), np.array(fits), memory_bytes, np.full(count, half_width))
    return [int(row) for row in rows]


def test_a_faster_layout_that_may_not_fit_is_tried_second() -> None:
    # The third is as certain to fit as the first, but a tenth slower.
    assert order([1.0, 0.96, 1.1], [1.0, 0.5, 1.0]) == [0, 1, 2]
    # If all fit, the fastest comes first, and the next in speed adds more than a slower one.
    assert order([1.0, 0.9, 1.5], [1.0, 1.0, 1.0]) == [1, 0, 2]
    # A layout that cannot fit adds nothing.
    assert order([1.0, 0.1, 1.1], [1.0, 0.0, 1.0]) == [0, 2, 1]


def test_less_memory_breaks_ties_in_speed() -> None:
    assert order([1.0, 0.999, 1.0], [1.0, 1.0, 1.0])[0] == 0


def expected_best(rows: list[int], seconds: Floats, fits: Floats, deviation: float) -> float:
    """Returns the mean of the best speed among the rows, by simulation."""
    draw = np.random.default_rng(0)
    shape = (20_000, len(rows))
    speeds = np.exp(deviation * draw.standard_normal(shape)) / seconds[rows]
    return float(np.mean(np.max(speeds * (draw.random(shape) < fits[rows]), axis=1)))


def test_places_agree_with_simulation() -> None:
    draw = np.random.default_rng(3)
    for _ in range(5):
        seconds, fits = draw.uniform(1.0, 1.2, 8), draw.uniform(0.3, 1.0, 8)
        rows = order(seconds.tolist(), fits.tolist(), half_width=0.04)
        for place in range(1, TRIED):
            kept = rows[:place]
            values = {
                row: expected_best([*kept, row], seconds, fits, 0.04 / 1.2816)
                for row in range(8)
                if row not in kept
            }
            assert values[rows[place]] >= max(values.values()) * (1 - 2e-3)


@often
@given(
    st.lists(st.tuples(st.floats(1e-3, 1e3), st.floats(0.0, 1.0)), min_size=1, max_size=40),
    st.floats(0.0, 0.5),
)
def test_every_layout_has_one_place(rows: list[tuple[float, float]], half_width: float) -> None:
    seconds, fits = map(list, zip(*rows, strict=True))
    places = order(seconds, fits, half_width)
    assert sorted(places) == list(range(len(rows)))
    # Probabilities below 1e-300 are treated alike.
    score = np.maximum(np.array(fits), 1e-300) / np.array(seconds)
    assert score[places[0]] >= score.max() * np.exp(-0.01) * (1 - 1e-9)
    assert order([], []) == []


def test_few_micro_batches_are_refused_where_the_measured_software_refuses_them() -> None:
    short = PlannedLayouts.of(
        [PlannedLayout(pipeline=8, accumulation=steps) for steps in (6, 7, 8)]
    )
    for links, refused in (("playbook-h100", [True, False, False]), ("nvlink", [False] * 3)):
        asked = ClusterQuestion(
            parse_shape("llama-1b"), cluster_of("h100-80gb", 8, links), 4096, 8, 8
        )
        assert predict(asked, short, CALIBRATION).refused.tolist() == refused
    asked = ClusterQuestion(
        parse_shape("llama-1b"), cluster_of("h100-80gb", 8, "playbook-h100"), 4096, 8, 8
    )
    dropped = plan(asked, CALIBRATION).dropped
    assert any(count > 0 for reason, count in dropped.items() if "micro-batches" in reason)
