"""The notation of links, and cells with links, before any namespace is made."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from bench.expand import expand
from bench.matrix import Host, Matrix, read_matrix
from harness.cell.cell import Cell, Link, link_text
from harness.cell.errors import UsageError
from harness.links.emulated import shares
from harness.links.switch import burst_bytes
from harness.nodes.agent import _received
from harness.record.trial import shared_machine

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
def test_one_text_for_one_link(written: Any, text: str, rate: float | None, seconds: float) -> None:
    assert link_text(written) == text
    assert Link.of(text) == Link(rate, pytest.approx(seconds))
    assert link_text(text) == text


@given(rate=some.integers(1, 99999), delay=some.integers(0, 999999))
def test_the_text_of_a_link_is_parsed_back(rate: int, delay: int) -> None:
    link = Link(rate * 1e6, delay * 1e-6)
    again = Link.of(link.text)
    assert again.bits_per_second == pytest.approx(link.bits_per_second)
    assert again.delay_seconds == pytest.approx(link.delay_seconds)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("fast", "write a link as none, 1gbit"),
        ("1ms 1gbit", "write a link as"),
        ("1gbit 1gbit", "write a link as"),
        (1000, "write a link as"),
        ({}, "write a link as"),
        ({"rate": "1gbit", "loss": "1%"}, "write a link as"),
        ("10kbit", "from 1mbit to 100gbit"),
        ("1gbit 2s", "at most 1s"),
    ],
    ids=str,
)
def test_a_bad_link_is_reported_with_file_and_key(tmp_path: Path, written: Any, said: str) -> None:
    import json

    file = tmp_path / "my.yaml"
    file.write_text(
        json.dumps({"cells": [{"strategy": "ddp", "devices": 2, "nodes": 2, "links": [written]}]})
    )
    with pytest.raises(UsageError, match=rf"my\.yaml, cells\[0\]: links: .*{said}"):
        expand(read_matrix(str(file)), HOST, name=str(file))


def test_a_link_makes_another_measurement_of_the_same_training() -> None:
    plain = Cell(strategy="ddp", devices=2, nodes=2)
    over = Cell(strategy="ddp", devices=2, nodes=2, links="1gbit")  # type: ignore[call-arg]
    assert plain.id != over.id
    assert plain.id == Cell(strategy="ddp", devices=2, nodes=2, links="").id
    assert over.name == "ddp llama-mini x2 on 2 nodes over 1gbit (emulated) fp32 batch 8"
    assert (
        "over unshaped links (emulated)"
        in Cell(strategy="ddp", devices=2, nodes=2, links="none").name
    )
    assert over.reference() == plain.reference()


def test_a_cell_with_links_needs_nodes_but_no_agents_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("harness.links.emulated.unsupported_reason", lambda: "")
    cells = [
        {
            "strategy": "ddp",
            "devices": 2,
            "workload": "llama-nano",
            "links": ["1gbit"],
            "nodes": [1, 2, "many"],
        }
    ]
    found = expand(Matrix(cells=cells), HOST)
    assert [(cell.nodes, cell.devices) for cell in found.cells] == [(2, 2)]
    [left] = found.left_out
    assert left.status == "refused"
    assert "nodes" in left.reason


def test_a_host_without_namespaces_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "harness.links.emulated.unsupported_reason",
        lambda: "emulated links need tc: apt-get install iproute2",
    )
    cells = [
        {"strategy": "ddp", "devices": 2, "nodes": 2, "workload": "llama-nano", "links": "1gbit"}
    ]
    found = expand(Matrix(cells=cells), HOST)
    assert [(left.status, left.reason) for left in found.left_out] == [
        ("unavailable", "emulated links need tc: apt-get install iproute2")
    ]


def test_a_rate_by_hand() -> None:
    """A megabyte arrives every 0.1 s; counting begins after the third."""

    class Stream:
        def recv_into(self, buffer: bytearray) -> int:
            return 10**6

    ticks = (tick / 10 for tick in itertools.count())
    assert _received(Stream(), lambda: next(ticks)) == pytest.approx(8e7)  # type: ignore[arg-type]


def test_bursts_by_hand() -> None:
    assert [burst_bytes(rate) for rate in (1e6, 1e8, 1e9, 1e10)] == [2**16, 2**16, 2**17, 2**18]


def test_nodes_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.links.emulated._cards", list)
    monkeypatch.setattr("harness.links.emulated.allowed_cores", lambda: [0, 2, 1, 3, 5])
    assert shares(2) == [([0, 2], None), ([1, 3], None)]
    assert shares(6) == [
        ([0], None),
        ([2], None),
        ([1], None),
        ([3], None),
        ([5], None),
        ([0], None),
    ]
    monkeypatch.setattr("harness.links.emulated._cards", lambda: ["0", "1", "2", "3"])
    assert [gpus for _, gpus in shares(2)] == ["0,1", "2,3"]


def test_emulated_links_are_labelled() -> None:
    nodes = [{"machine": "a"}, {"machine": "a"}]
    assert (
        shared_machine(nodes, "network namespaces, tbf")
        == "2 nodes on 1 machine: emulated links between them (network namespaces, tbf)"
    )
