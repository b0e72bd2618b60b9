"""Messages between two ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from harness.measure.hardware_benchmark import (
    BANDWIDTH_BYTES,
    WARMUP,
    all_reduce_seconds,
    measure_link,
    timed,
)


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


def test_messages_between_two_ranks_are_timed() -> None:
    """The ranks check each sum. 16,384 times the bytes take longer on any machine."""
    found = measure_link("gloo")
    assert 0 < found.latency_seconds < BANDWIDTH_BYTES / found.bytes_per_second


def test_ranks_that_fail_are_a_reason_and_leave_no_process() -> None:
    with pytest.raises(RuntimeError, match="no such backend"):
        measure_link("no such backend")


def test_numbers_that_were_not_sent_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process does a rank's work without sending anything, so it finds its own number."""
    monkeypatch.setattr(dist, "all_reduce", lambda *_: None)
    with pytest.raises(
        RuntimeError,
        match="rank 0 received wrong numbers in messages of 4096 bytes",
    ):
        all_reduce_seconds(0, 4096, torch.device("cpu"))
