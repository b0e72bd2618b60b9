"""The chapter on emulated links: throughput against measured bandwidth, crossovers, bytes."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from harness.cell.cell import Cell
from harness.record.profile_record import ProfileRecord
from harness.record.store import Results
from reports import links_section
from reports.blocks import plain_text, spans
from reports.links_section import Chapter
from reports.run_report import ran
from reports.text import bits
from tests.unit.html_page import page_of
from tests.unit.made_results import MIB, stored, trial_rows
from tests.unit.test_figures import rounded

GOLDEN = Path(__file__).parents[1] / "golden" / "links.json"
BANDWIDTHS = {"100mbit": 95e6, "1gbit": 950e6, "10gbit": 9.4e9, "none": 30e9, "1gbit 1ms": 900e6}
BATCH = 8


def seconds(compute: float, sent_mib: float, messages: int, link: str) -> float:
    """Returns the seconds to compute, send and wait for the link's latency in sequence."""
    return (
        compute
        + sent_mib * MIB * 8 / BANDWIDTHS[link]
        + messages * (1e-3 if link.endswith("ms") else 3e-5)
    )


STRATEGIES = {"chatty": (0.010, 8.0, 2), "frugal": (0.040, 1.0, 2), "talker": (0.030, 0.5, 60)}
"""Seconds of compute, MiB sent and messages, from which crossovers can be worked out by hand."""


def run_over_links(
    folder: Path,
    strategies: Mapping[str, tuple[float, float, int]] = STRATEGIES,
    noise: float = 0.002,
) -> Results:
    rows: list[dict[str, Any]] = []
    for turn, (strategy, (compute, sent, messages)) in enumerate(strategies.items()):
        wobbles = [(-1.0, 0.2, 0.8)[(turn + trial) % 3] for trial in range(3)]
        for link, bandwidth in BANDWIDTHS.items():
            cell = Cell(strategy=strategy, devices=2, nodes=2, links=link)
            speed = BATCH / seconds(compute, sent, messages, link)
            rows += trial_rows(
                cell,
                [speed * (1 + noise * wobble) for wobble in wobbles],
                links=link,
                link_bits_per_second=bandwidth,
                link_latency_seconds=1e-3 if link.endswith("ms") else 3e-5,
                link_emulation="network namespaces and tbf",
                stand_in="nodes of one machine",
                sent_bytes_per_step=[sent * MIB, sent * MIB / 2],
                trained_parameters=MIB,
            )
    return stored(folder, rows)


def chapters(results: Results) -> list[Chapter]:
    one = ran(results)
    return links_section.chapters(one.cells, one.trials, one.profiles)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_over_links(tmp_path_factory.mktemp("links"))


@pytest.fixture(scope="module")
def chapter(results: Results) -> Chapter:
    (one,) = chapters(results)
    return one


def test_the_data_of_the_figure_is_the_golden(chapter: Chapter, update: bool) -> None:
    """`pytest --update` rewrites the golden file."""
    told = json.loads(
        json.dumps(rounded(dataclasses.asdict(chapter.chart) if chapter.chart else None))
    )
    if update:
        GOLDEN.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n")
    assert told == json.loads(GOLDEN.read_text())


def test_links_are_in_the_order_of_what_was_measured_and_delayed_ones_are_not_drawn(
    chapter: Chapter,
) -> None:
    words = [one.name for one in chapter.links]
    assert words == ["100mbit", "1gbit", "10gbit", "unshaped", "1gbit 1ms"]
    assert chapter.chart is not None
    assert [word for _, word in chapter.chart.links] == words[:4]
    for line in chapter.chart.lines:
        compute = STRATEGIES[line.label]
        assert line.values[1] == pytest.approx(BATCH * 64 / seconds(*compute, "1gbit"), rel=0.001)


def test_a_crossover_needs_significant_differences_at_both_ends(chapter: Chapter) -> None:
    """Over 1gbit and 10gbit, chatty takes 0.0807 and 0.0172 s, frugal 0.0489 and 0.0410 s."""
    (said,) = [words for words in chapter.crossovers if "chatty" in words and "frugal" in words]
    lead = [
        math.log(seconds(*STRATEGIES["chatty"], link) / seconds(*STRATEGIES["frugal"], link))
        for link in ("1gbit", "10gbit")
    ]
    share = lead[0] / (lead[0] - lead[1])
    place = math.exp(math.log(950e6) + share * math.log(9.4e9 / 950e6))
    assert said.startswith(f"Below about {bits(place, 2)} frugal")
    (other,) = [words for words in chapter.crossovers if "talker" in words and "frugal" in words]
    assert other.startswith("Latency"), "over 1gbit their order changes only with a delay"


def test_noisy_results_have_no_crossover(tmp_path: Path) -> None:
    (one,) = chapters(run_over_links(tmp_path, noise=0.5))
    assert one.crossovers == []


def test_an_undecided_link_between_two_decided_ones_does_not_hide_a_crossover(
    tmp_path: Path,
) -> None:
    """Both strategies are equally fast at 1gbit, so the crossover is there."""
    sent = 8.0
    compute = 0.010 + (sent - 1.0) * MIB * 8 / BANDWIDTHS["1gbit"]
    (one,) = chapters(
        run_over_links(tmp_path, {"chatty": (0.010, sent, 2), "frugal": (compute, 1.0, 2)})
    )
    assert one.crossovers[0].startswith("Below about 950 Mbit/s frugal")


def test_the_table_has_bytes(chapter: Chapter) -> None:
    sent = {
        plain_text(row.head): float(spans(row.cells[-1].text)[0].value) / MIB
        for row in chapter.table.rows
    }
    assert sent == {"chatty†": 8.0, "frugal†": 1.0, "talker†": 0.5}


def test_profiled_bytes_override_those_of_trials() -> None:
    good = ProfileRecord(
        run_id="run",
        cell_id="a",
        cell_name="a",
        started_at=datetime(2026, 1, 1, tzinfo=timezone.utc),
        status="ok",
        sent_bytes=(3.0, 5.0),
    )
    failed = dataclasses.replace(good, cell_id="b", status="failed", sent_bytes=(7.0,))
    assert links_section._wire_bytes([good, failed]) == {"a": 5.0}


def test_the_chapter_is_left_out_without_emulated_links(results: Results, tmp_path: Path) -> None:
    rows = trial_rows(Cell(strategy="a", devices=2, nodes=2), [2.0, 2.1]) + trial_rows(
        Cell(strategy="b", devices=2, nodes=2), [1.0, 1.1]
    )
    plain = stored(tmp_path / "plain", rows)
    assert chapters(plain) == []
    assert ["links" in page_of(one, tmp_path).headings for one in (results, plain)] == [True, False]
    columns = [name for name in plain.trials if str(name).startswith("link")]
    assert columns
    older = dataclasses.replace(plain, trials=plain.trials.drop(columns=columns))
    assert chapters(older) == []


def test_the_cells_of_each_link_are_ranked_apart(results: Results) -> None:
    """`chatty` sends most and computes least, so it is fastest if bandwidth is plentiful."""
    groups = ran(results).groups
    fastest = {group.rows[0].cell.links: group.rows[0].cell.strategy for group in groups}
    assert fastest == {
        "none": "chatty",
        "10gbit": "chatty",
        "1gbit": "talker",
        "100mbit": "talker",
        "1gbit 1ms": "frugal",
    }
