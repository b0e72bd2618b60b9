"""Comparison of runs: table text, Markdown for a pull request, and a self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.analysis.stats import ACROSS_RUNS_CONFIDENCE
from reports.markdown import escaped, table
from reports.text import DASH, number, plural, size

if TYPE_CHECKING:
    from harness.analysis.compare import ComparedCell, RunComparison
    from harness.analysis.selection import MeasuredCell

COLUMNS = (
    "cell",
    "A samples/s",
    "B samples/s",
    "B / A",
    f"{ACROSS_RUNS_CONFIDENCE * 100:g} % interval",
    "verdict",
    "peak memory, A to B",
)
NUMBERS = [column for column in COLUMNS if column not in ("cell", "verdict")]
FOLDED = ("added", "no difference seen", "not compared")


def words(line: ComparedCell) -> list[str]:
    speed = line.throughput
    interval = (
        f"{speed.low:.3f} to {speed.high:.3f}"
        if speed and speed.low is not None and speed.high is not None
        else DASH
    )
    speeds = [number(cell.speed if cell else None) for cell in (line.first, line.second)]
    return [
        line.cell_name,
        *speeds,
        f"{speed.ratio:.3f}" if speed else DASH,
        interval,
        line.verdict,
        memory(line),
    ]


def memory(line: ComparedCell) -> str:
    """Returns `96.1 MiB to 98.0 MiB, x 1.02`; a dash if unknown or measured by different
    methods."""
    if line.first is None or line.second is None or line.memory is None:
        return DASH
    return f"{size(line.first.peak)} to {size(line.second.peak)}, x {line.memory.ratio:.2f}"


def disturbed(compared: RunComparison) -> list[tuple[str, str]]:
    return [
        (line.cell_name, "; ".join(line.disturbed)) for line in compared.lines if line.disturbed
    ]


def trials(cell: MeasuredCell | None) -> str:
    return "" if cell is None else plural(cell.result.recorded_trials, "trial")


def markdown(compared: RunComparison) -> str:
    """Returns Markdown for a comment on a pull request: findings first, the rest folded."""
    shown = [line for line in compared.lines if line.regression or line.kind not in FOLDED]
    folded = [line for line in compared.lines if line not in shown]
    parts = [
        f"### {escaped(compared.first)} → {escaped(compared.second)}",
        f"**{escaped(compared.headline)}**",
    ]
    if compared.differences:
        parts.append("Not the same software: " + escaped(", ".join(compared.differences)))
    parts += _md_lines(shown)
    for kind in FOLDED:
        if some := [line for line in folded if line.kind == kind]:
            parts += [
                f"<details><summary>{kind}: {len(some)}</summary>",
                *_md_lines(some),
                "</details>",
            ]
    if cells := disturbed(compared):
        parts += [
            f"<details><summary>disturbed trials of cells: {len(cells)}</summary>",
            "\n".join(f"- {escaped(name)}: {escaped(trials)}" for name, trials in cells),
            "</details>",
        ]
    method = "\n".join(f"- {name}: {escaped(text)}" for name, text in compared.method.items())
    parts += ["<details><summary>how it was decided</summary>", method, "</details>"]
    return "\n\n".join(parts) + "\n"


def _md_lines(lines: Sequence[ComparedCell]) -> list[str]:
    measured = [line for line in lines if line.throughput]
    others = [
        f"- **{line.kind}** {escaped(line.cell_name)}: {escaped(line.reason)}"
        for line in lines
        if not line.throughput
    ]
    return ([table(COLUMNS, NUMBERS, [words(line) for line in measured])] if measured else []) + (
        ["\n".join(others)] if others else []
    )


def page(compared: RunComparison) -> str:
    """Returns one HTML page that loads nothing and runs only its own script."""
    from reports.page import fill

    return fill(
        "compare.html.j2",
        compared=compared,
        columns=COLUMNS,
        words=words,
        trials=trials,
        disturbed=disturbed(compared),
    )
