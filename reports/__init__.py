"""Turns records into self-contained pages, text and data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from harness.analysis.ranking import Choice
    from harness.record.store import Results
    from reports.sections import Written

__all__ = ["write_report", "write_whole"]


def write_report(
    results: Results, path: Path, instead: str = "", baseline: Choice | None = None
) -> Path:
    """Writes the report of one run, or a comparison of several; returns its path.

    The suffix chooses the format (default: html). `baseline`: by default DDP, else the single
    process. Raises UsageError if it cannot write, ValueError without runs.
    """
    path = Path(path)
    return write_whole(report_text(results, format_of(path), (), baseline).text, path, instead)


def write_whole(text: str, path: Path, instead: str = "") -> Path:
    """Writes atomically; raises UsageError with the advice `instead` on failure."""
    from harness.cell.durable import write_atomically
    from harness.cell.errors import UsageError

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_atomically(path, text)
    except OSError as error:
        advice = f"; choose a file with: {instead}" if instead else ""
        raise UsageError(
            f"report {str(path)!r} cannot be written ({error.strerror}){advice}"
        ) from None


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
    from reports.run_report import ran, reports_of
    from reports.run_sections import run_page, run_text
    from reports.sections import Written

    several, printed = len(results.runs) > 1, chosen == "pdf-ready"
    if chosen == "csv":
        return Written(export_records.as_csv(reports_of(results, baseline)), [])
    if chosen == "json":
        more = runs.as_json(runs.compare_all(results)) if several else {}
        return Written(export_records.as_json(reports_of(results, baseline), **more), [])
    if several:
        compared = runs.compare_all(results)
        if chosen == "md":
            return runs.runs_text(compared, sections)
        return runs.runs_page(compared, sections, printed)
    report = ran(results, baseline)
    if chosen == "md":
        return run_text(report, sections)
    return run_page(report, sections, printed)
