from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from harness.analysis.baseline import Choice
    from harness.record.store import Results
    from reports.sections import Written

Format = Literal["html", "md", "csv", "json", "pdf-ready"]


def format_of(path: Path) -> Format:
    suffix = path.suffix.lstrip(".")
    return suffix if suffix in get_args(Format) else "html"  # type: ignore[return-value]


def report_text(
    results: Results,
    chosen: Format = "html",
    sections: Sequence[str] = (),
    baseline: Choice | None = None,
) -> Written:
    """Returns the report of one run, or a comparison of several; raises ValueError without runs.

    `sections`: by default all. `baseline`: see `reports.write_report`.
    """
    from reports import export_records, runs
    from reports.run_report import each, ran
    from reports.run_sections import run_page, run_text
    from reports.sections import Written

    several, printed = len(results.runs) > 1, chosen == "pdf-ready"
    if chosen == "csv":
        return Written(export_records.as_csv(each(results, baseline)), [])
    if chosen == "json":
        more = runs.as_json(runs.compare_all(results)) if several else {}
        return Written(export_records.as_json(each(results, baseline), **more), [])
    if several:
        compared = runs.compare_all(results)
        if chosen == "md":
            return runs.runs_text(compared, sections)
        return runs.runs_page(compared, sections, printed)
    report = ran(results, baseline)
    if chosen == "md":
        return run_text(report, sections)
    return run_page(report, sections, printed)
