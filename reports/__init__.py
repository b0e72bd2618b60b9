"""Turns records into self-contained pages, text and data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.analysis.baseline import Choice
    from harness.record.store import Results

__all__ = ["write_report", "write_whole"]


def write_report(
    results: Results, path: Path, instead: str = "", baseline: Choice | None = None
) -> Path:
    """Writes the report of one run, or a comparison of several; returns its path.

    The suffix chooses the format (default: html). `baseline`: by default DDP, else the single
    process. Raises UsageError if it cannot write, ValueError without runs.
    """
    from reports.formats import format_of, report_text

    path = Path(path)
    return write_whole(report_text(results, format_of(path), (), baseline).text, path, instead)


def write_whole(text: str, path: Path, instead: str = "") -> Path:
    """Writes atomically; raises UsageError with the advice `instead` on failure."""
    from harness.host.folders import write_atomically
    from harness.spec.errors import UsageError

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_atomically(path, text)
    except OSError as error:
        advice = f"; choose a file with: {instead}" if instead else ""
        raise UsageError(
            f"report {str(path)!r} cannot be written ({error.strerror}){advice}"
        ) from None
