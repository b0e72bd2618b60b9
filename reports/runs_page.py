"""Sections, page and text of the report that compares several runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.analysis.history import Series
from reports import runs_markdown, trends
from reports.markdown import escaped
from reports.markdown_report import section_text
from reports.page import Page, section_page
from reports.panels import Panels
from reports.runs import Runs
from reports.sections import Section
from reports.svg import Picture
from reports.text import plural

MOST_CHARTS = 60


@dataclass(frozen=True)
class Chart:
    series: Series
    picture: Picture


def _charts(runs: Runs, panels: Panels) -> list[Chart]:
    """Returns every cell's throughput, changes first, and memory if it changed."""
    several = [
        series
        for series in (*runs.throughput, *runs.memory)
        if len(series.points) > 1 and (series.figure == "throughput" or series.last_change)
    ]
    several.sort(key=lambda series: series.last_change is None)
    return [
        Chart(series, panels.pictures.add(trends.draw, trends.trend(series, f"trend-{place}")))
        for place, series in enumerate(several[:MOST_CHARTS])
    ]


SECTIONS: tuple[Section[Runs], ...] = (
    Section("verdict", "Verdict", lambda runs, _: runs.runs, runs_markdown.verdict_text),
    Section(
        "cells",
        "Cells of the newest run against the others",
        lambda runs, _: runs.rows,
        runs_markdown.cells_text,
        "Cells",
    ),
    Section(
        "others",
        "Without a comparison",
        lambda runs, _: runs.others,
        runs_markdown.others_text,
    ),
    Section("history", "History", _charts, runs_markdown.history_text),
    Section("changes", "All cells over the runs", lambda runs, _: runs.series, short="Changes"),
    Section(
        "method",
        "How it was decided",
        lambda runs, _: runs.method,
        runs_markdown.method_text,
    ),
)


def runs_page(runs: Runs, wanted: Sequence[str] = (), printed: bool = False) -> Page:
    """Returns one page of the wanted sections (all by default); raises UsageError as `with_data`
    does. `printed`: use the print layout."""
    return section_page("runs.html.j2", runs, SECTIONS, wanted, printed, trends=trends)


def runs_text(runs: Runs, wanted: Sequence[str] = ()) -> tuple[str, list[str]]:
    """Returns Markdown of all sections that have data, or the wanted ones, and the names of wanted
    ones without data. Raises UsageError as `with_data` does."""
    title = (
        f"How do these runs compare? {plural(len(runs.runs), 'run')}, the newest"
        f" {escaped(runs.newest.run_id)}"
    )
    return section_text([f"# {title}"], runs, SECTIONS, wanted)
