"""Properties of the planner's formulas over all layouts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.planner.cluster.cluster_plan import plan
from harness.planner.cluster.layout_memory import model_states
from harness.planner.cluster.prediction import predict
from harness.planner.cluster.question import PlannedLayout, PlannedLayouts, enumerate_layouts
from tests.unit.test_planner import CALIBRATION, MIXED, often, question

DATA_AXES = st.sampled_from([2, 4, 8, 16])
layouts = st.builds(
    PlannedLayout,
    data=DATA_AXES,
    pipeline=st.sampled_from([1, 2, 4, 8]),
    tensor=st.sampled_from([1, 2, 4, 8, 16]),
    zero=st.sampled_from([0, 1, 2, 3]),
    micro_batch=st.sampled_from([1, 2, 4]),
    accumulation=st.sampled_from([1, 8, 64]),
    recompute=st.sampled_from([0, 1, 2]),
)


@often
@given(layouts)
def test_a_larger_data_axis_needs_no_more_memory(layout: PlannedLayout) -> None:
    """Starts at two ranks, because one rank has no gradient buckets."""
    larger = dataclasses.replace(layout, data=2 * layout.data)
    found = predict(question(), PlannedLayouts.of([layout, larger]), CALIBRATION)
    small, large = found.memory.demand
    assert large <= small * (1 + 1e-9)


every_axis = st.builds(
    PlannedLayout,
    data=st.sampled_from([1, 2, 8, 16]),
    pipeline=st.sampled_from([1, 2, 8]),
    tensor=st.sampled_from([1, 2, 16]),
    context=st.sampled_from([1, 4]),
    expert=st.sampled_from([1, 8]),
    zero=st.sampled_from([0, 1, 2, 3]),
    micro_batch=st.sampled_from([1, 4]),
    accumulation=st.sampled_from([1, 8]),
    recompute=st.sampled_from([0, 2]),
    offload=st.sampled_from([0, 1]),
    chunks=st.sampled_from([1, 2]),
).filter(lambda layout: layout.data % layout.expert == 0)
shares = st.one_of(st.just(1.0), st.floats(0.01, 1.0))


@settings(max_examples=150)
@given(every_axis, shares, shares, shares, st.sampled_from([0.0, 0.5]))
def test_slower_links_never_speed_up(
    layout: PlannedLayout, reduce: float, gather: float, wire: float, overlap: float
) -> None:
    asked = question("mixtral-8x7b")
    # The fitted overlap of the data axis is almost zero; other calibrations may differ.
    constants = dataclasses.replace(CALIBRATION.time, data_overlap=overlap)
    calibration = dataclasses.replace(CALIBRATION, time=constants)

    links = asked.cluster
    slow = dataclasses.replace(
        links,
        reduce_bytes_per_second=reduce * links.reduce_bytes_per_second,
        gather_bytes_per_second=gather * links.gather_bytes_per_second,
        wire_bytes_per_second=wire * (links.wire_bytes_per_second or 0.0),
    )
    one = PlannedLayouts.of([layout])
    before = predict(asked, one, calibration).seconds[0]
    after = predict(dataclasses.replace(asked, cluster=slow), one, calibration).seconds[0]
    assert after >= before * (1 - 1e-9)


def test_offload_never_speeds_up_a_sharded_step() -> None:
    """Whoever runs the collectives, they slow the compute that hides them."""
    asked = question("llama-8b", 64, 1024)
    levels = [
        PlannedLayout(data=64, zero=3, micro_batch=2, accumulation=8, offload=level)
        for level in range(4)
    ]
    seconds = predict(asked, PlannedLayouts.of(levels), CALIBRATION).seconds
    assert (np.diff(seconds) > 0).all()


@often
@given(st.floats(1e6, 1e13), st.integers(1, 4096))
def test_each_stage_of_zero_keeps_no_more(parameters: float, ranks: int) -> None:
    states = [
        float(sum(model_states(parameters, parameters / ranks, stage, MIXED))) for stage in range(4)
    ]
    assert states == sorted(states, reverse=True)


@often
@given(layouts, st.sampled_from([2, 4, 16]))
def test_intervals_never_narrow_away_from_the_data(layout: PlannedLayout, factor: int) -> None:
    farther = dataclasses.replace(layout, data=factor * layout.data)
    found = predict(question(), PlannedLayouts.of([layout, farther]), CALIBRATION)
    assert found.half_width[1] >= found.half_width[0]
    for model in ("llama-8b", "llama-70b", "llama-405b"):
        wider = predict(question(model), PlannedLayouts.of([layout]), CALIBRATION)
        assert wider.half_width[0] >= found.half_width[0]
        assert wider.memory_half_width[0] >= found.memory_half_width[0]


@often
@given(
    st.floats(0, 14), st.integers(0, 12), st.integers(0, 10), st.integers(0, 10), st.integers(0, 3)
)
def test_every_step_away_from_the_data_counts(
    model: float, nodes: int, tensor: int, pipeline: int, side: int
) -> None:
    """A step is a larger or smaller model, or more nodes, tensor ranks or pipeline ranks."""
    seen = CALIBRATION.range
    low, high = seen.parameters

    def beyond(outside: list[float]) -> float:
        sizes = [
            np.array([most * 2 ** int(by)]) for most, by in zip(mosts, outside[1:], strict=True)
        ]
        larger, smaller = high * 2 ** outside[0], low / 2 ** outside[0]
        more = float(seen.layout_beyond(*sizes)[0])
        results = [seen.model_beyond(size) + more for size in (larger, smaller)]
        assert results[0] == pytest.approx(results[1])
        return results[0]

    mosts = (seen.nodes[1], seen.tensor, seen.pipeline)
    here = [model, float(nodes), float(tensor), float(pipeline)]
    farther = [by + (number == side) for number, by in enumerate(here)]
    assert beyond(here) == pytest.approx(sum(here))
    assert beyond(farther) == pytest.approx(beyond(here) + 1)


@often
@given(st.floats(0.01, 0.5), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_the_risk_of_being_slow_never_narrows_an_interval(
    half: float, slow: float, more: float
) -> None:
    slow, more = sorted((slow, more))
    widths = CALIBRATION.spread.upper(np.array([half, half]), np.array([slow, more]))
    assert half <= widths[0] <= widths[1] * (1 + 1e-9)
    assert np.isfinite(widths).all()
    # Nor does the width decrease around the risk at which slow runs begin to decide it.
    around = CALIBRATION.spread.upper(np.full(200, half), np.linspace(0.09, 0.2, 200))
    assert (np.diff(around) >= -1e-9).all()
    sure, slowed = CALIBRATION.spread.upper(np.full(2, half), np.array([0.0, 1.0]))
    assert sure == pytest.approx(half)
    assert slowed >= CALIBRATION.spread.slow


@settings(max_examples=20)
@given(
    st.sampled_from(["llama-1b", "llama-8b", "llama-405b", "mixtral-8x7b", "gpt-1t"]),
    st.sampled_from([1, 2, 8, 32, 1024]),
    st.sampled_from([512, 4096, 131072]),
)
def test_no_figure_is_negative_or_missing(model: str, devices: int, sequence: int) -> None:
    asked = dataclasses.replace(question(model, devices, 1024), sequence_length=sequence)
    found = predict(asked, enumerate_layouts(asked), CALIBRATION)
    for parts in (found.time, found.memory):
        for field in dataclasses.fields(parts):
            values = getattr(parts, field.name)
            assert np.isfinite(values).all(), field.name
            assert (values >= -1e-9).all(), field.name
    assert ((found.fits >= 0) & (found.fits <= found.runs) & (found.runs <= 1)).all()
    assert (found.memory.reserved <= asked.cluster.memory_bytes).all()
    assert (found.layouts.devices == devices).all()
    batches = found.layouts.data * found.layouts.micro_batch * found.layouts.accumulation
    assert (batches == 1024).all()


@pytest.mark.parametrize(
    ("model", "devices", "batch"),
    [("llama-1b", 1, 8), ("llama-8b", 64, 64), ("llama-405b", 512, 512), ("mixtral-8x7b", 16, 32)],
)
def test_no_figure_of_an_answer_is_negative_or_missing(
    model: str, devices: int, batch: int
) -> None:
    """Answers include pipelines with a simulated schedule."""
    for goal in ("throughput", "energy"):
        asked = question(model, devices, batch)
        found = plan(asked, CALIBRATION, goal, top=300, price_per_hour=2.0)
        for one in found.candidates:
            parts = one.parts.values()
            figures = [v for v in dataclasses.asdict(one).values() if isinstance(v, float)]
            assert all(np.isfinite(v) and v >= 0 for v in figures), one
            assert all(v >= -1e-9 * one.seconds for v in parts), one
            assert sum(parts) == pytest.approx(one.seconds)
            assert one.seconds_low <= one.seconds <= one.seconds_high
            assert one.reserved_low <= one.reserved_bytes <= one.reserved_high
