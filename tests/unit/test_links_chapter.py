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
from reports.run_sections import run_text
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
    assert [one.words for one in chapter.links] == [
        "100mbit",
        "1gbit",
        "10gbit",
        "unshaped",
        "1gbit 1ms",
    ]
    assert (chapter.links[0].rate, chapter.links[0].latency) == ("95 Mbit/s", "0.030 ms")
    assert chapter.chart is not None
    assert chapter.chart.links == (
        (95e6, "100mbit"),
        (950e6, "1gbit"),
        (9.4e9, "10gbit"),
        (30e9, "unshaped"),
    )
    assert [line.label for line in chapter.chart.lines] == [
        "talker",
        "frugal",
        "chatty",
    ], "by throughput on the slowest link"
    for line in chapter.chart.lines:
        compute = STRATEGIES[line.label]
        assert line.values[1] == pytest.approx(BATCH * 64 / seconds(*compute, "1gbit"), rel=0.001)
        assert all(
            low is not None and high is not None and low < value < high
            for low, value, high in zip(line.lows, line.values, line.highs, strict=True)
        )


def test_a_crossover_needs_significant_differences_at_both_ends(chapter: Chapter) -> None:
    """Over 1gbit and 10gbit, chatty takes 0.0807 and 0.0172 s, frugal 0.0489 and 0.0410 s."""
    (said,) = [words for words in chapter.crossovers if "chatty" in words and "frugal" in words]
    lead = [
        math.log(seconds(*STRATEGIES["chatty"], link) / seconds(*STRATEGIES["frugal"], link))
        for link in ("1gbit", "10gbit")
    ]
    share = lead[0] / (lead[0] - lead[1])
    place = math.exp(math.log(950e6) + share * math.log(9.4e9 / 950e6))
    assert (
        said
        == f"Below about {bits(place, 2)} frugal is faster than chatty, above it slower (measured"
        " at 950 Mbit/s and 9.4 Gbit/s)."
    )
    assert not [
        words
        for words in chapter.crossovers
        if "Below" in words and "talker" in words and "frugal" in words
    ], "their order never changes"


def test_latency_turns_strategies_around_too(chapter: Chapter) -> None:
    """At 1 Gbit/s talker takes 0.036 s and frugal 0.049 s. A delay of 1 ms slows talker's 60
    messages more than frugal's 2."""
    assert (
        "Latency reverses an order: over 1gbit talker is faster than frugal, over 1gbit 1ms slower."
        in chapter.crossovers
    )


def test_noisy_results_have_no_crossover(tmp_path: Path) -> None:
    (one,) = chapters(run_over_links(tmp_path, noise=0.5))
    assert one.crossovers == []
    assert (
        "No two strategies differ significantly"
        in page_of(run_over_links(tmp_path / "page", noise=0.5), tmp_path).text
    )


def test_an_undecided_link_between_two_decided_ones_does_not_hide_a_crossover(
    tmp_path: Path,
) -> None:
    """Both strategies are equally fast at 1gbit, so the crossover is there."""
    sent = 8.0
    compute = 0.010 + (sent - 1.0) * MIB * 8 / BANDWIDTHS["1gbit"]
    (one,) = chapters(
        run_over_links(tmp_path, {"chatty": (0.010, sent, 2), "frugal": (compute, 1.0, 2)})
    )
    (said,) = [words for words in one.crossovers if words.startswith("Below")]
    assert said.startswith("Below about 950 Mbit/s frugal")
    assert "(measured at 95 Mbit/s and 9.4 Gbit/s" in said


def test_the_table_has_bytes_and_their_order_is_judged(chapter: Chapter, tmp_path: Path) -> None:
    assert (
        chapter.by_bytes
        == "On the slowest link, 100mbit (95 Mbit/s measured), the order by throughput is the order"
        " of the bytes sent, fewest first, in all 3 pairs with a significant difference."
    )
    sent = {
        plain_text(row.head): float(spans(row.cells[-1].words)[0].value) / MIB
        for row in chapter.table.rows
    }
    assert sent == {"chatty†": 8.0, "frugal†": 1.0, "talker†": 0.5}
    (one,) = chapters(run_over_links(tmp_path, {"slow": (0.9, 0.5, 2), "quick": (0.010, 2.0, 2)}))
    assert one.by_bytes.endswith(
        "in 0 of 1 pair with a significant difference; not so: quick (2.00 MiB) is faster than slow"
        " (0.500 MiB)."
    )


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


def test_the_page_has_the_chapter_with_every_number_and_says_that_links_are_emulated(
    results: Results, tmp_path: Path
) -> None:
    page, frame = page_of(results, tmp_path), ran(results)
    assert "links" in page.headings
    section = page.text[
        page.text.index("What a slow interconnect does") : page.text.index(
            "Parity: is it the same training?"
        )
    ]
    for words in (
        "The links are emulated",
        "Below about",
        "Latency reverses an order",
        "95 Mbit/s",
        "0.030 ms",
        "network namespaces and tbf",
    ):
        assert words in section
    values = {
        float(value) for _, field, value in page.grids if field == "tokens_per_second" and value
    }
    assert {cell.speed.tokens_per_second for cell in frame.cells} <= values
    (summary,) = [
        str(a["aria-label"])
        for tag, a in page.tags
        if tag == "svg" and "bandwidth" in str(a["aria-label"])
    ]
    assert "emulated" in summary


def test_the_chapter_is_in_the_text_too(results: Results) -> None:
    written = run_text(ran(results), ["links"])
    text = written.text
    assert written.absent == []
    assert "Throughput (tokens/s) over emulated links" in text
    assert "950 Mbit/s, 0.030 ms measured" in text
    assert "- Below about" in text
    assert f"| {BATCH * 64 / seconds(*STRATEGIES['chatty'], '1gbit'):,.0f}"[:6] in text


def test_the_chapter_is_left_out_without_emulated_links(tmp_path: Path) -> None:
    rows = trial_rows(Cell(strategy="a", devices=2, nodes=2), [2.0, 2.1]) + trial_rows(
        Cell(strategy="b", devices=2, nodes=2), [1.0, 1.1]
    )
    plain = stored(tmp_path / "plain", rows)
    assert chapters(plain) == []
    assert "links" not in page_of(plain, tmp_path).headings
    columns = [name for name in plain.trials if str(name).startswith("link")]
    assert columns
    older = dataclasses.replace(plain, trials=plain.trials.drop(columns=columns))
    assert chapters(older) == []


@pytest.mark.parametrize(
    ("value", "said"),
    [(9.4e9, "9.4 Gbit/s"), (948.3e6, "948 Mbit/s"), (1e6, "1 Mbit/s"), (999.0, "999 bit/s")],
)
def test_bits(value: float, said: str) -> None:
    assert bits(value) == said


def test_the_verdict_has_a_row_for_each_link_whose_names_do_not_repeat_it(results: Results) -> None:
    """`chatty` sends most and computes least, so it is fastest if bandwidth is plentiful."""
    text = run_text(ran(results)).text
    verdict = text[text.index("| Workload and setting") :].split("\n\n", 1)[0]
    fastest = {
        setting: name.partition("fastest: ")[2].partition(",")[0]
        for _, setting, name, *_ in (row.split("|") for row in verdict.splitlines()[2:])
    }
    assert {
        link: name
        for setting, name in fastest.items()
        for link in BANDWIDTHS
        if f"over {link.replace('none', 'unshaped links')} (emulated)" in setting
    } == {
        "none": "chatty†",
        "10gbit": "chatty†",
        "1gbit": "talker†",
        "1gbit 1ms": "frugal†",
        "100mbit": "talker†",
    }
