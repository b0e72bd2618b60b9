"""The page of one run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.analysis.baseline import Choice
from reports import facts
from reports.cautions import disturbance, disturbance_legend, gpu_findings
from reports.names import marks, named
from reports.page import Page, section_page, without_collection
from reports.run_report import RunReport, ran
from reports.run_sections import SECTIONS

if TYPE_CHECKING:
    from harness.record.store import Results


def render(results: Results, baseline: Choice | None = None) -> str:
    """Returns the page of one run; raises ValueError if there is not exactly one."""
    return run_page(ran(results, baseline)).text


@without_collection
def run_page(report: RunReport, wanted: Sequence[str] = (), printed: bool = False) -> Page:
    """Returns the page with all sections that have data, or the wanted ones.

    `printed`: use the print layout. Raises UsageError as `with_data` does.
    """
    with_cells = not wanted or "cells" in wanted
    return section_page(
        "report.html.j2",
        report,
        SECTIONS,
        wanted,
        printed,
        hardware=facts.hardware(report.run),
        anchors={cell.cell_id for cell in report.cells} if with_cells else set(),
        named=named,
        marks=marks,
        disturbance=disturbance,
        disturbance_legend=disturbance_legend,
        gpu_findings=gpu_findings,
    )
