"""Names of cells and settings, with marks and cautions for unusual cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from harness.analysis.cell_result import CAUSES, CellResult
from harness.analysis.setting import SETTING
from harness.cell.cell import over
from harness.cell.errors import plural
from reports import blocks as ui
from reports.text import percent

STAND_IN, OVERSUBSCRIBED, DISTURBED = "†", "‡", "¶"
NOTES = {
    STAND_IN: f"{STAND_IN} hatched: a stand-in ran instead of the real thing",
    OVERSUBSCRIBED: (
        f"{OVERSUBSCRIBED} hatched: more ranks than cores, so its times say nothing about real"
        " hardware"
    ),
}
_APART = (*SETTING, "seed", "labels", "dropout", "documents", "schedule", "parity_steps")
INEXACT = "*"
NOT_THE_SAME = f"{INEXACT} not exactly the same training as one process"
DOT = "●"
MAY_BE_FASTEST = f"{DOT} may be the fastest of its setting"
NOT_RANKED = "Not ranked:"
_MOST_FINDINGS = 3
STATUS = {
    "failed": "failed",
    "timeout": "passed its time limit",
    "out_of_memory": "out of memory",
    "diverged": "trained something else",
    "interrupted": "interrupted",
    "unavailable": "not available here",
    "refused": "cannot exist",
    "skipped": "skipped",
    "ok": "ok",
}


def marks(cell: CellResult) -> str:
    """Returns `†` for stand-ins and `‡` for more ranks than cores, to append to labels."""
    crowded = cell.placement.oversubscribed and cell.speed.samples_per_second is not None
    return (STAND_IN if cell.placement.stand_in is not None else "") + (
        OVERSUBSCRIBED if crowded else ""
    )


def dot(cell: CellResult) -> str:
    """Returns a mark for cells that the verdict counts among the possible fastest; else empty."""
    return DOT if cell.relative.may_be_fastest else ""


def named(cell: CellResult, *, place: bool = True, label: str = "") -> str:
    """Returns the label with marks and unusual settings.

    `place`: include nodes and links. `label`: instead of the cell's.
    """
    parts = [label or cell.cell.label]
    if place and cell.cell.nodes > 1:
        parts.append(f"{cell.cell.nodes} nodes")
    if place and (link := link_words(cell)):
        parts.append(link)
    if cell.cell.regime == "weak" and cell.cell.devices > 1:
        parts.append("weak")
    return " · ".join(parts) + marks(cell)


def names_apart(cells: Sequence[CellResult]) -> dict[str, str]:
    """Returns names by cell id. On one device both regimes train the same, so names may be equal;
    then those of weak scaling say so."""
    names = {cell.cell_id: named(cell, place=False) for cell in cells}
    counts = Counter(names.values())
    return {
        cell.cell_id: name + (" (weak)" if counts[name] > 1 and cell.cell.regime == "weak" else "")
        for cell in cells
        if (name := names[cell.cell_id])
    }


def link_words(cell: CellResult) -> str:
    """Returns `over 1gbit (emulated)`; empty on the nodes' native network."""
    return over(cell.cell.links) if cell.cell.links else ""


def device_words(cell: CellResult) -> str:
    """Returns `2 GPUs`, `16 GPUs on 2 nodes`, `2 devices on 2 nodes over 1gbit (emulated)`."""
    devices = plural(cell.cell.devices, "GPU" if cell.cell.device == "cuda" else "device")
    if cell.cell.nodes > 1:
        devices += f" on {cell.cell.nodes} nodes"
    link = link_words(cell)
    return f"{devices} {link}" if link else devices


def unit(throughput: str) -> str:
    return "tokens/s" if throughput.startswith("tokens") else "samples/s"


def chart_name(cell: CellResult, workload: str) -> str:
    """Returns `label x2 bf16`, plus the cell's workload unless it is `workload`."""
    other = "" if cell.cell.workload_name == workload else f" {cell.cell.workload_name}"
    return f"{named(cell)} x{cell.cell.devices} {cell.cell.precision}{other}"


def main_workload(cells: Sequence[CellResult]) -> str:
    return Counter(cell.cell.workload_name for cell in cells).most_common(1)[0][0]


def titles_apart(titles: Sequence[str], cells: Sequence[CellResult]) -> list[str]:
    """Adds to equal titles what differs between their cells, else a number."""
    apart = []
    for index, (title, cell) in enumerate(zip(titles, cells, strict=True)):
        equal = [other.cell for name, other in zip(titles, cells, strict=True) if name == title]
        different = [
            f"{name.replace('_', ' ')} {getattr(cell.cell, name) or 'none'}"
            for name in _APART
            if len({getattr(other, name) for other in equal}) > 1
        ]
        earlier = titles[:index].count(title)
        if len(equal) > 1 and not different:
            different = [f"reference {earlier + 1}"]
        apart.append(" · ".join([title, *different]))
    return apart


def notes_for(cells: Sequence[CellResult], drawn: str = "hatched") -> tuple[str, ...]:
    seen = "".join(marks(cell) for cell in cells)
    return tuple(text.replace("hatched", drawn) for mark, text in NOTES.items() if mark in seen)


def cell_name(cell: CellResult, *, place: bool = True) -> list[ui.Inline]:
    return [ui.Span(named(cell, place=place), "data", f"#cell-{cell.cell_id}"), *_noise(cell)]


def workload_name(cell: CellResult) -> list[ui.Inline]:
    link = ui.Span(cell.cell.workload_name, "data", f"#cell-{cell.cell_id}")
    return [link, marks(cell), *_noise(cell)]


def _noise(cell: CellResult) -> list[ui.Inline]:
    said = disturbance(cell)
    return [ui.Span(DISTURBED, tip=said)] if said else []


def flags(cell: CellResult) -> list[tuple[str, str]]:
    """Returns the word and the meaning of each of a cell's flags."""
    cautions = []
    if cell.placement.stand_in is not None:
        cautions.append(("stand-in", cell.placement.stand_in))
    if cell.placement.oversubscribed and cell.speed.samples_per_second is not None:
        cautions.append(
            ("oversubscribed", "more ranks than cores: its times say nothing about real hardware")
        )
    if cell.disturbance.trials:
        cautions.append((f"{DISTURBED} disturbed", disturbance(cell) + gpu_findings(cell)))
    if cell.speed.drifts:
        change = f"step time still changed by {percent(cell.speed.trend)} during the timed steps"
        cautions.append(("trend", f"warm-up was too short: {change}"))
    if cell.trials == 1 and cell.status == "ok":
        measured = cell.speed.samples_per_second_low is not None
        source = (
            "its interval comes from the spread of the other cells" if measured else "no interval"
        )
        cautions.append(("1 trial", source))
    if cell.narrow_sums:
        cautions.append(("narrow sums", cell.narrow_sums))
    if cell.expected and cell.status == "diverged":
        cautions.append(("expected to diverge", "expected by the matrix: not a failure"))
    return cautions


def disturbance(cell: CellResult) -> str:
    by_cause, trials = cell.disturbance.by_cause, plural(cell.trials, "trial")
    return "; ".join(f"{CAUSES[cause]} {count} of {trials}" for cause, count in by_cause.items())


def gpu_findings(cell: CellResult) -> str:
    findings = cell.disturbance.gpu_findings
    more = f", and {len(findings) - _MOST_FINDINGS} more" if len(findings) > _MOST_FINDINGS else ""
    return f" ({'; '.join(findings[:_MOST_FINDINGS])}{more})" if findings else ""


def disturbance_legend(cells: Iterable[CellResult]) -> str:
    seen = {cause for cell in cells for cause in cell.disturbance.by_cause}
    return "; or ".join(
        f"{meaning} some of its trials" for cause, meaning in CAUSES.items() if cause in seen
    )
