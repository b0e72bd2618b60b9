"""Draws charts as inline SVG with the page's theme and content policy."""

from __future__ import annotations

import contextlib
import hashlib
import io
import multiprocessing
import os
import re
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from reports.blocks import ChartData

# Placeholder colours for matplotlib; style.css maps each to light and dark (Okabe and Ito's
# palette, safe for colour-blind readers).
INK, SOFT, GRID, PAPER = "#0a0a01", "#0a0a02", "#0a0a03", "#0a0a04"
BEST, REST, WARN = "#0a0a05", "#0a0a06", "#0a0a07"
SERIES = tuple(f"#0a0b{i:02x}" for i in range(7))
_THEME = {
    INK: "ink",
    SOFT: "soft",
    GRID: "grid",
    PAPER: "paper",
    BEST: "best",
    REST: "rest",
    WARN: "warn",
}
_THEME |= {colour: f"series-{i}" for i, colour in enumerate(SERIES)}

WIDTH = 360
"""Chart width in pixels of the page at 100%."""
FEW = 8
"""Charts drawn in the time that starting a process takes."""

_SETTINGS: dict[str, object] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 11.5,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": SOFT,
    "axes.facecolor": "none",
    "axes.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.unicode_minus": False,
    "figure.facecolor": "none",
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "hatch.linewidth": 1.2,
    "text.color": INK,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelsize": 11,
    "ytick.labelsize": 11,
    "axes.labelsize": 11.5,
}
_PIXEL = 1 / 72


def canvas(
    height: float, left: float, right: float, bottom: float, top: float
) -> tuple[Figure, Axes]:
    """Returns a figure of WIDTH x height pixels with one axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH * _PIXEL, height * _PIXEL), dpi=72)
    share = (
        left / WIDTH,
        bottom / height,
        (WIDTH - left - right) / WIDTH,
        (height - bottom - top) / height,
    )
    axes = figure.add_axes(share)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def draw(charts: Sequence[ChartData]) -> tuple[dict[str, str], str]:
    """Draws charts, on several cores if there are many. Returns the SVGs by name, and CSS rules, as
    the content policy forbids style attributes."""
    if not charts:
        return {}, ""
    import matplotlib.figure  # noqa: F401  # Imported here, before forking.

    workers = min(len(os.sched_getaffinity(0)), len(charts) // FEW)
    with contextlib.ExitStack() as held:
        if workers > 1:
            context = multiprocessing.get_context("fork")
            pool = held.enter_context(ProcessPoolExecutor(workers, context))
            drawn = list(pool.map(_drawn, charts, chunksize=2))
        else:
            drawn = list(map(_drawn, charts))
    rules = {name: rule for _, styles in drawn for name, rule in styles.items()}
    svgs = {chart.name: svg for chart, (svg, _) in zip(charts, drawn, strict=True)}
    return svgs, "\n".join(f".{name} {{ {rule} }}" for name, rule in rules.items())


def _themed(part: str) -> str:
    if part.startswith("font:"):  # Drops the family: the page sets it.
        size = re.search(r"([\d.]+)px", part)
        weight = "700" if "bold" in part or "700" in part else "400"
        return f"font-size: {size.group(1) if size else 11}px; font-weight: {weight}"
    for colour, name in _THEME.items():
        part = part.replace(colour, f"var(--{name})")
    return part


def _drawn(chart: ChartData) -> tuple[str, dict[str, str]]:
    import matplotlib

    buffer, name = io.BytesIO(), chart.name
    settings: Any = _SETTINGS | {"svg.hashsalt": name}
    with warnings.catch_warnings(), matplotlib.rc_context(settings):
        # Matplotlib's font may lack glyphs; the reader's browser has other fonts.
        warnings.simplefilter("ignore", UserWarning)
        figure = chart.draw()
        figure.savefig(
            buffer,
            format="svg",
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    styles: dict[str, str] = {}
    return _cleaned(buffer.getvalue(), name, chart.summary, styles), styles


def _class_for(declarations: str, styles: dict[str, str]) -> str:
    parts = [part.strip() for part in declarations.split(";") if part.strip()]
    themed = "; ".join(_themed(part) for part in parts if not part.startswith("font-family"))
    name = f"f{hashlib.blake2s(themed.encode(), digest_size=4).hexdigest()}"
    styles[name] = themed
    return name


def _cleaned(source: bytes, name: str, summary: str, styles: dict[str, str]) -> str:
    from xml.etree import ElementTree

    root = ElementTree.fromstring(source)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith(("}metadata", "}style")):
                parent.remove(child)
    for element in root.iter():
        _clean(element, name, styles)
    root.attrib = {
        "viewBox": root.attrib["viewBox"],
        "class": "chart",
        "role": "img",
        "aria-label": summary,
    }
    return ElementTree.tostring(root, encoding="unicode")


def _clean(element: Element, name: str, styles: dict[str, str]) -> None:
    element.tag = element.tag.rpartition("}")[2]
    attributes = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
    if style := attributes.pop("style", None):
        attributes["class"] = _class_for(style.replace("url(#", f"url(#{name}-"), styles)
    elif attributes.get("fill") in _THEME:  # Background of a hatching.
        attributes["class"] = _class_for(f"fill: {attributes.pop('fill')}", styles)
    if element.tag == "g":
        attributes.pop("id", None)
    for key, value in attributes.items():
        if key == "id":
            attributes[key] = f"{name}-{value}"
        elif key == "href":
            attributes[key] = value.replace("#", f"#{name}-")
        elif "url(#" in value:
            attributes[key] = value.replace("url(#", f"url(#{name}-")
    element.attrib = attributes
