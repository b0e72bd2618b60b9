"""Names of cells and settings, with marks on what is unusual."""

from __future__ import annotations

from harness.analysis.cell_result import CellResult
from harness.spec.link import over
from reports.text import plural

STAND_IN, OVERSUBSCRIBED, DISTURBED = "†", "‡", "¶"
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
    """Returns `†` for a stand-in, `‡` for more ranks than cores, appended to labels."""
    crowded = cell.placement.oversubscribed and cell.speed.samples_per_second is not None
    return (STAND_IN if cell.placement.stand_in is not None else "") + (
        OVERSUBSCRIBED if crowded else ""
    )


def named(cell: CellResult, *, place: bool = True, label: str = "") -> str:
    """Returns the chart label, with marks and unusual nodes, links and regime.

    `place`: whether to include nodes and links, which a group's title states. `label`: replaces the
    cell's.
    """
    words = [label or cell.cell.label]
    if place and cell.cell.nodes > 1:
        words.append(f"{cell.cell.nodes} nodes")
    if place and (link := link_words(cell)):
        words.append(link)
    if cell.cell.regime == "weak":
        words.append("weak")
    return " · ".join(words) + marks(cell)


def link_words(cell: CellResult) -> str:
    """Returns `over 1gbit (emulated)`; empty on the nodes' own network."""
    return over(cell.cell.links) if cell.cell.links else ""


def device_words(cell: CellResult) -> str:
    """Returns `2 GPUs`, `16 GPUs on 2 nodes`, `2 devices on 2 nodes over 1gbit (emulated)`."""
    words = plural(cell.cell.devices, "GPU" if cell.cell.device == "cuda" else "device")
    if cell.cell.nodes > 1:
        words += f" on {cell.cell.nodes} nodes"
    link = link_words(cell)
    return f"{words} {link}" if link else words


def unit(throughput: str) -> str:
    return "tokens/s" if throughput.startswith("tokens") else "samples/s"
