"""Links: hand-computed fits, their properties, and real messages between two ranks."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as some

from harness.measure import hardware_benchmark as links
from harness.measure.hardware_benchmark import SIZES, WARMUP, fit, measure_links, repeats, timed


def test_sizes_are_powers_of_four_from_4_kib_to_64_mib() -> None:
    assert (SIZES[0], SIZES[-1], len(SIZES)) == (4 * 2**10, 64 * 2**20, 8)
    assert all(larger == 4 * smaller for smaller, larger in itertools.pairwise(SIZES))
    assert [repeats(size) for size in (4096, 2**22, 2**26)] == [50, 16, 7]


def test_a_fit_by_hand() -> None:
    """With 10 microseconds and 1 GB/s, 1 kB takes 11 and 1 MB takes 1010 microseconds."""
    found = fit([1e3, 1e6], [11e-6, 1010e-6])
    assert found.latency_seconds == pytest.approx(10e-6)
    assert found.bandwidth_bytes_per_second == pytest.approx(1e9)
    assert found.largest_deviation == pytest.approx(0, abs=1e-9)
    assert found.seconds(2e6) == pytest.approx(2010e-6)


def test_a_fit_with_an_error_by_hand() -> None:
    """The times are 1 and 3 at one size. (c - 1)^2 + (c/3 - 1)^2 is least at c = 1.2, 60 % off from
    3."""
    found = fit([8.0, 8.0, 8.0, 8.0], [1.0, 3.0, 1.0, 3.0])
    assert found.seconds(8.0) == pytest.approx(1.2)
    assert found.largest_deviation == pytest.approx(0.6)


def test_neither_term_goes_below_zero() -> None:
    shrinking = fit([1.0, 10.0, 100.0], [3.0, 2.0, 1.0])
    assert shrinking.bandwidth_bytes_per_second is None
    assert shrinking.seconds(1.0) == shrinking.seconds(100.0) == shrinking.latency_seconds > 0
    through_zero = fit([10.0, 100.0], [1.0, 20.0])  # a straight line would begin at -1.1
    assert through_zero.latency_seconds == 0
    assert through_zero.bandwidth_bytes_per_second is not None


@settings(deadline=None)
@given(latency=some.floats(1e-7, 1e-1), bandwidth=some.floats(1e5, 1e12))
def test_an_exact_line_is_found(latency: float, bandwidth: float) -> None:
    times = [latency + size / bandwidth for size in SIZES]
    found = fit(SIZES, times)
    assert [found.seconds(size) for size in SIZES] == pytest.approx(times, rel=1e-6)
    assert found.largest_deviation < 1e-6


times = some.lists(some.floats(1e-6, 10.0), min_size=len(SIZES), max_size=len(SIZES))


@settings(deadline=None)
@given(took=times, factor=some.floats(0.01, 100.0))
def test_a_fit_is_never_negative_never_beaten_and_keeps_its_unit(
    took: list[float], factor: float
) -> None:
    def error(latency: float, per_byte: float) -> float:
        return sum(
            ((latency + per_byte * size) / seconds - 1) ** 2
            for size, seconds in zip(SIZES, took, strict=True)
        )

    found = fit(SIZES, took)
    per_byte = 1 / found.bandwidth_bytes_per_second if found.bandwidth_bytes_per_second else 0.0
    assert found.latency_seconds >= 0
    assert per_byte >= 0
    least = error(found.latency_seconds, per_byte)
    for change in (0.9, 1.1):
        assert error(found.latency_seconds * change, per_byte) >= least - 1e-9
        assert error(found.latency_seconds, per_byte * change) >= least - 1e-9
    assume(found.latency_seconds > 0 and per_byte > 0)
    slower = fit(SIZES, [seconds * factor for seconds in took])
    assert slower.latency_seconds == pytest.approx(found.latency_seconds * factor, rel=1e-6)
    assert slower.largest_deviation == pytest.approx(found.largest_deviation, rel=1e-6)


def test_timed_without_a_clock() -> None:
    """Each reading is a second later, so each repetition takes 1 s. The warm-up does not count."""
    events: list[str] = []
    readings = iter(range(100))
    took = timed(
        lambda: events.append("run"),
        2,
        lambda: events.append("wait"),
        lambda: float(next(readings)),
    )
    assert took == [1.0, 1.0]
    assert events == ["wait", "run", "wait"] * (WARMUP + 2)


def test_messages_between_two_ranks() -> None:
    """The ranks check each operation's result. 4096 times the bytes take longer on any machine."""
    found = measure_links("gloo", sizes=(2**12, 2**24))
    assert [link.operation for link in found] == ["all_reduce", "all_gather", "point_to_point"]
    for link in found:
        assert 0 < link.seconds[0] < link.seconds[1]
        assert link.fit.bandwidth_bytes_per_second is not None
        told = link.as_json()
        assert [message["bytes"] for message in told["messages"]] == [2**12, 2**24]
        json.dumps(told)


def test_ranks_that_fail_are_a_reason_and_leave_no_process() -> None:
    with pytest.raises(RuntimeError, match="no such backend"):
        measure_links("no such backend", sizes=(4096,))


def test_numbers_that_were_not_sent_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process does a rank's work without sending anything, so it finds its own number."""
    import torch
    import torch.distributed as dist

    for name in ("all_reduce", "all_gather", "send", "recv"):
        monkeypatch.setattr(dist, name, lambda *_: None)
    with pytest.raises(
        RuntimeError,
        match="rank 0 received wrong numbers in messages of 4096 bytes",
    ):
        links._operations(0, 4096, torch.device("cpu"))
