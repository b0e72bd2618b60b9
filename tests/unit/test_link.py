"""The notation of links, and cells with links, before any namespace is made."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from bench.expand import expand
from bench.matrix import Host, Matrix
from harness.cell.cell import Cell, Link, link_text
from harness.cell.errors import UsageError
from harness.links.emulated import shares
from harness.nodes.agent import _received

HOST = Host("cpu", 2, 2**34)


@pytest.mark.parametrize(
    ("written", "text", "rate", "seconds"),
    [
        ("none", "none", None, 0),
        ("1gbit", "1gbit", 1e9, 0),
        ("1000mbit", "1gbit", 1e9, 0),
        ("2.5Gbit 500us", "2.5gbit 500us", 2.5e9, 5e-4),
        ({"rate": "1gbit", "delay": "1ms"}, "1gbit 1ms", 1e9, 1e-3),
        ({"rate": "none", "delay": "0.01s"}, "10ms", None, 1e-2),
        ({"delay": "2ms"}, "2ms", None, 2e-3),
        ({"rate": "100mbit"}, "100mbit", 1e8, 0),
        ({"rate": "none"}, "none", None, 0),
    ],
    ids=str,
)
def test_equal_links_have_one_text(
    written: Any, text: str, rate: float | None, seconds: float
) -> None:
    assert link_text(written) == text
    assert Link.of(text) == Link(rate, pytest.approx(seconds))
    assert link_text(text) == text


@given(rate=some.integers(1, 99999), delay=some.integers(0, 999999))
def test_the_text_of_a_link_is_parsed_back(rate: int, delay: int) -> None:
    link = Link(rate * 1e6, delay * 1e-6)
    again = Link.of(link.text)
    assert again.bits_per_second == pytest.approx(link.bits_per_second)
    assert again.delay_seconds == pytest.approx(link.delay_seconds)


MALFORMED = ["fast", "1ms 1gbit", "1gbit 1gbit", 1000, {}, {"rate": "1gbit", "loss": "1%"}]


@pytest.mark.parametrize("written", [*MALFORMED, "10kbit", "1gbit 2s"], ids=str)
def test_a_bad_link_is_reported_with_its_key(written: Any) -> None:
    cells = [{"strategy": "ddp", "devices": 2, "nodes": 2, "links": [written]}]
    with pytest.raises(UsageError, match=r"my\.yaml, cells\[0\]: links: "):
        expand(Matrix(cells=cells), HOST, name="my.yaml")


def test_a_link_makes_another_measurement_of_the_same_training() -> None:
    plain = Cell(strategy="ddp", devices=2, nodes=2)
    over = Cell(strategy="ddp", devices=2, nodes=2, links="1gbit")  # type: ignore[call-arg]
    assert plain.id != over.id
    assert plain.id == Cell(strategy="ddp", devices=2, nodes=2, links="").id
    assert "over 1gbit (emulated)" in over.name
    assert over.reference() == plain.reference()


@pytest.mark.parametrize("lacks", ["", "tc"])
def test_a_cell_with_links_needs_nodes_and_namespaces_but_no_agents_of_the_run(
    monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    monkeypatch.setattr("harness.links.emulated.unsupported_reason", lambda: lacks)
    axes = {"strategy": "ddp", "devices": 2, "workload": "llama-nano", "links": "1gbit"}
    found = expand(Matrix(cells=[{**axes, "nodes": [1, 2, "many"]}]), HOST)
    assert [(cell.nodes, cell.devices) for cell in found.cells] == ([] if lacks else [(2, 2)])
    left = {(left.cell.nodes, left.status): left.reason for left in found.left_out}
    assert "nodes" in left[1, "refused"]
    assert left.get((2, "unavailable"), "") == lacks


def test_a_rate_matches_that_worked_out_by_hand() -> None:
    """A megabyte arrives every 0.1 s; counting begins after the third."""

    class Stream:
        def recv_into(self, buffer: bytearray) -> int:
            return 10**6

    ticks = (tick / 10 for tick in itertools.count())
    assert _received(Stream(), lambda: next(ticks)) == pytest.approx(8e7)  # type: ignore[arg-type]


def test_nodes_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.links.emulated._cards", list)
    monkeypatch.setattr("harness.links.emulated.allowed_cores", lambda: [0, 2, 1, 3, 5])
    assert shares(2) == [([0, 2], None), ([1, 3], None)]
    assert [cores for cores, _ in shares(6)] == [[0], [2], [1], [3], [5], [0]]
    monkeypatch.setattr("harness.links.emulated._cards", lambda: ["0", "1", "2", "3"])
    assert [gpus for _, gpus in shares(2)] == ["0,1", "2,3"]
