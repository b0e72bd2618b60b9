"""A report as Markdown: its title, a line of facts, and its sections."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from reports import facts
from reports.markdown import escaped
from reports.run_report import RunReport
from reports.run_sections import SECTIONS
from reports.sections import AnyReport, Paragraphs, Section, with_data
from reports.text import plural


def markdown(report: RunReport, wanted: Sequence[str] = ()) -> tuple[str, list[str]]:
    """Returns the report with all sections that have data, or the wanted ones, and the names of
    wanted ones without data.

    Raises UsageError as `with_data` does.
    """
    run = report.run
    title = f"Which parallelism strategy? Matrix {escaped(run.matrix)}, run {escaped(run.run_id)}"
    line = (
        f"{facts.hardware(run)}; PyTorch {run.torch_version};"
        f" {plural(len(report.cells), 'cell')}, {report.ranked} ranked"
    )
    head = [f"# {title}", escaped(line)]
    if run.gpus_unused:
        head.append(f"**GPUs are not used:** {escaped(run.gpus_unused)}.")
    return section_text(head, report, SECTIONS, wanted)


def section_text(
    head: Paragraphs,
    report: AnyReport,
    sections: Iterable[Section[AnyReport]],
    wanted: Sequence[str],
) -> tuple[str, list[str]]:
    """Returns the text of the wanted sections (all by default), and the names of those without
    data."""
    in_text = [section for section in sections if section.markdown]

    def make(section: Section[AnyReport]) -> Paragraphs:
        return section.markdown(report) if section.markdown else []

    parts, absent = with_data(in_text, wanted, make)
    paragraphs = list(head)
    for section, part in parts:
        paragraphs += [f"## {section.title}", *part]
    return "\n\n".join(paragraphs) + "\n", absent
