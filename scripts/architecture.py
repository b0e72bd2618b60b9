"""Draws the packages and their imports from the code into docs/explanation/architecture.md:
`.venv/bin/python scripts/architecture.py`.

A box has the first sentence of its package. Transitive arrows are left out.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import grimp
import networkx
from importlinter import api

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "explanation" / "architecture.md"
DRAWN = re.compile(r"```mermaid\n.*?```\n", re.DOTALL)
OUTSIDE = ("bench", "reports")


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
    below = ROOT / package if package in OUTSIDE else ROOT / "harness" / package
    file = below / "__init__.py" if below.is_dir() else below.with_suffix(".py")
    text = " ".join((ast.get_docstring(ast.parse(file.read_text())) or "").split())
    return text.split(". ")[0].rstrip(".")


def _box(package: str) -> str:
    return f'    {package}["<b>{package}</b><br>{description(package)}"]'


def page() -> str:
    """Returns the page with a picture of today's code. Mermaid places the boxes."""
    boxes = [_box(package) for row in layers() for package in row]
    arrows = [
        f"    {source} --> {target}"
        for source, targets in sorted(edges().items())
        for target in sorted(targets)
    ]
    lines = [
        "```mermaid",
        "flowchart TD",
        *map(_box, OUTSIDE),
        "    subgraph harness",
        *boxes,
        "    end",
        *arrows,
        "```\n",
    ]
    return DRAWN.sub(lambda _: "\n".join(lines), PAGE.read_text(), count=1)


if __name__ == "__main__":
    PAGE.write_text(page())
