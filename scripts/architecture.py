"""Draws the packages and their imports from the code into docs/explanation/architecture.svg:
`.venv/bin/python scripts/architecture.py`.

Rows are the layers of the import contract. A box has the first sentence of its package. Transitive
arrows are left out.
"""

from __future__ import annotations

import ast
import html
import itertools
import textwrap
from dataclasses import dataclass
from pathlib import Path

import grimp
import networkx
from importlinter import api

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "explanation" / "architecture.svg"

WIDTH, HEIGHT = 218, 76
COLUMN, ROW = 252, 122
"""Distance between boxes in a row, and between rows."""
GAP = 24
TOP, MARGIN = 24, 24
TIP = 7


def package_of(module: str) -> str:
    """Returns a module's box: a package of harness, bench or reports."""
    parts = module.split(".")
    return parts[1] if parts[0] == "harness" and len(parts) > 1 else parts[0]


def edges() -> dict[str, set[str]]:
    """Returns the packages that each package imports, even if only for types, without those that
    follow from others."""
    graph = grimp.build_graph("bench", "harness", "reports", cache_dir=None)
    packages = networkx.DiGraph(
        (package_of(module), package_of(imported))
        for module in graph.modules
        for imported in graph.find_modules_directly_imported_by(module)
    )
    packages.remove_edges_from([edge for edge in packages.edges if len(set(edge)) == 1])
    packages.remove_nodes_from(["harness"])
    reduced = networkx.transitive_reduction(packages)
    return {package: set(reduced[package]) for package in reduced if reduced[package]}


def layers() -> list[list[str]]:
    """Returns rows of packages, topmost first."""
    contracts = api.read_configuration(str(ROOT / "pyproject.toml"))["contracts_options"]
    contract = next(c for c in contracts if c.get("containers") == ["harness"])
    return [[name.strip() for name in row.split("|")] for row in contract["layers"]]


def description(package: str) -> str:
    below = ROOT / package if package in ("bench", "reports") else ROOT / "harness" / package
    file = below / "__init__.py" if below.is_dir() else below.with_suffix(".py")
    text = " ".join((ast.get_docstring(ast.parse(file.read_text())) or "").split())
    return text.split(". ")[0].rstrip(".")


@dataclass(eq=False)
class NodeBox:
    name: str
    row: int
    x: float = 0.0
    """Centre, in pixels."""

    @property
    def y(self) -> int:
        return TOP + self.row * ROW


def placed(edges: dict[str, set[str]]) -> dict[str, NodeBox]:
    """Returns a box per package; reports stand outside, to the right.

    A row's boxes are ordered by the mean position of their neighbours (Sugiyama, Tagawa and Toda,
    IEEE SMC 11, 1981).
    """
    rows = [
        [NodeBox(name, number) for name in row] for number, row in enumerate([["bench"], *layers()])
    ]
    boxes = {box.name: box for row in rows for box in row}
    near: dict[str, list[NodeBox]] = {name: [] for name in boxes}
    for source, targets in sorted(edges.items()):
        for target in sorted(targets & boxes.keys() if source in boxes else set()):
            near[source].append(boxes[target])
            near[target].append(boxes[source])
    for row in rows:
        for number, box in enumerate(row):
            box.x = number * COLUMN
    for sweep in range(24):
        for row in rows if sweep % 2 == 0 else reversed(rows):
            for box in row:
                box.x = _mean([other.x for other in near[box.name]], box.x)
            row.sort(key=lambda box: box.x)
            _part(row)
    right = max(box.x for box in boxes.values())
    row_above = min(boxes[target].row for target in edges["reports"]) - 1
    boxes["reports"] = NodeBox("reports", row_above, right + COLUMN + GAP)
    shift = MARGIN + 2 * GAP + WIDTH / 2 - min(box.x for box in boxes.values())
    for box in boxes.values():
        box.x = round(box.x + shift)
    return boxes


def _mean(values: list[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _part(row: list[NodeBox]) -> None:
    mean = _mean([box.x for box in row], 0.0)
    for left, right in itertools.pairwise(row):
        right.x = max(right.x, left.x + COLUMN)
    shift = mean - _mean([box.x for box in row], 0.0)
    for box in row:
        box.x += shift


def passage(
    source: NodeBox, target: NodeBox, boxes: dict[str, NodeBox], taken: list[float]
) -> float:
    """Returns the position nearest to the target where an arrow passes between boxes."""
    passed = [box.x for box in boxes.values() if source.row < box.row < target.row]
    return min(
        (
            target.x + sign * offset
            for offset in range(0, 2000, 4)
            for sign in (1, -1)
            if all(abs(target.x + sign * offset - x) >= WIDTH / 2 + GAP / 2 for x in passed)
            and all(abs(target.x + sign * offset - x) >= GAP / 2 for x in taken)
        ),
        key=lambda x: abs(x - target.x),
    )


def _arrow(source: NodeBox, target: NodeBox, boxes: dict[str, NodeBox], taken: list[float]) -> str:
    x, y, end = source.x, source.y + HEIGHT, target.y - TIP
    path = f"M{x:.0f},{y}"
    if target.row > source.row + 1:
        lane = passage(source, target, boxes, taken)
        taken.append(lane)
        first, last = TOP + (source.row + 1) * ROW, TOP + (target.row - 1) * ROW + HEIGHT
        path += _bend(x, y, lane, first) + f" V{last}"
        x, y = lane, last
    return f'<path d="{path}{_bend(x, y, target.x, end)}"/>'


def _bend(x: float, y: float, to_x: float, to_y: float) -> str:
    middle = (y + to_y) / 2
    return f" C{x:.0f},{middle:.0f} {to_x:.0f},{middle:.0f} {to_x:.0f},{to_y:.0f}"


def _drawn(box: NodeBox) -> str:
    kind = "outside" if box.name in ("bench", "reports") else "inside"
    lines = textwrap.wrap(description(box.name), 34, break_on_hyphens=False)
    assert len(lines) <= 3, f"the first sentence of {box.name} is too long for its box"
    text = "".join(
        f'<text x="{box.x:.0f}" y="{box.y + 38 + 14 * number}">{html.escape(line)}</text>'
        for number, line in enumerate(lines)
    )
    return (
        f'<g class="{kind}"><rect x="{box.x - WIDTH / 2:.0f}" y="{box.y}" width="{WIDTH}"'
        f' height="{HEIGHT}" rx="7"/>'
        f'<text class="name" x="{box.x:.0f}" y="{box.y + 20}">{box.name}</text>{text}</g>'
    )


STYLE = """
text { font: 11.5px system-ui, sans-serif; text-anchor: middle; fill: #333 }
.name { font-weight: 700; font-size: 15px; fill: #111 }
.note { text-anchor: start; font-size: 13px }
.inside rect { fill: #e9f1fb; stroke: #4a78b5 } .outside rect { fill: #fbf0dc; stroke: #b5873a }
.frame { fill: #f8fafc; stroke: #9ab; stroke-dasharray: 5 4 }
.paper { fill: #fff }
path { fill: none; stroke: #556; stroke-width: 1.4; marker-end: url(#tip) }
path.tip { fill: #556; stroke: none; marker-end: none }
"""


def picture() -> str:
    arrows_of = edges()
    boxes = placed(arrows_of)
    inside = [box for box in boxes.values() if box.name not in ("bench", "reports")]
    taken: list[float] = []
    arrows = [
        _arrow(boxes[source], boxes[target], boxes, taken)
        for source in sorted(arrows_of)
        for target in sorted(arrows_of[source])
    ]
    left = min([box.x - WIDTH / 2 for box in inside] + taken) - GAP
    right = max(box.x for box in inside) + WIDTH / 2 + GAP
    top, bottom = boxes["bench"].y + HEIGHT + 12, max(box.y for box in inside) + HEIGHT + GAP
    width, height = boxes["reports"].x + WIDTH // 2 + MARGIN, bottom + MARGIN
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"
 height="{height}" role="img">
<title>The packages and what they import</title>
<style>{STYLE}</style>
<defs><marker id="tip" viewBox="0 0 8 8" refX="1" refY="4" markerWidth="{TIP}"
 markerHeight="{TIP}" orient="auto"><path class="tip" d="M0,0 L8,4 L0,8 z"/></marker></defs>
<rect class="paper" width="{width}" height="{height}"/>
<rect class="frame" x="{left:.0f}" y="{top}" width="{right - left:.0f}" height="{bottom - top}"
 rx="10"/>
<text class="note" x="{left + 12:.0f}" y="{bottom - 12}">harness</text>
<text class="note" x="{MARGIN}" y="{MARGIN}">An arrow means: imports.</text>
<text class="note" x="{MARGIN}" y="{MARGIN + 18}">Implied arrows are left out.</text>
{chr(10).join(arrows)}
{chr(10).join(map(_drawn, boxes.values()))}
</svg>
"""


if __name__ == "__main__":
    PICTURE.write_text(picture())
