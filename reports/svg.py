"""A matplotlib figure -> inline SVG whose colours follow the page's theme and which a strict content policy lets through."""

from __future__ import annotations

import io
import re
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from xml.etree.ElementTree import Element

    from markupsafe import Markup
    from matplotlib.figure import Figure

# Stand-ins that matplotlib draws with; style.css says what each is in light and in dark (Okabe and Ito's palette, safe for
# colour-blind readers).
INK, SOFT, GRID, PAPER = "#0a0a01", "#0a0a02", "#0a0a03", "#0a0a04"
BEST, REST, WARN = "#0a0a05", "#0a0a06", "#0a0a07"
SERIES = tuple(f"#0a0b{i:02x}" for i in range(7))
_THEME = {INK: "ink", SOFT: "soft", GRID: "grid", PAPER: "paper", BEST: "best", REST: "rest", WARN: "warn"}
_THEME |= {colour: f"series-{i}" for i, colour in enumerate(SERIES)}

_SETTINGS: dict[str, Any] = {
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


class StyleSheet:
    """Collects the declarations of all figures as classes: a strict policy forbids style attributes."""

    def __init__(self) -> None:
        self._classes: dict[str, str] = {}

    def class_for(self, declarations: str) -> str:
        kept = [part.strip() for part in declarations.split(";") if part.strip()]
        kept = [_themed(part) for part in kept if not part.startswith("font-family")]
        return self._classes.setdefault("; ".join(kept), f"f{len(self._classes)}")

    @property
    def text(self) -> str:
        return "\n".join(f".{name} {{ {declarations} }}" for declarations, name in self._classes.items())


def _themed(part: str) -> str:
    if part.startswith("font:"):  # size and family in one: the family is the page's
        size = re.search(r"([\d.]+)px", part)
        weight = "700" if "bold" in part or "700" in part else "400"
        return f"font-size: {size.group(1) if size else 11}px; font-weight: {weight}"
    for colour, name in _THEME.items():
        part = part.replace(colour, f"var(--{name})")
    return part


def inline(draw: Callable[[], Figure], name: str, summary: str, sheet: StyleSheet) -> Markup:
    """The drawn figure as one `<svg role=img>`; `name` is unique in the page, `summary` is read by screen readers."""
    import matplotlib
    from markupsafe import Markup

    buffer = io.BytesIO()
    settings: Any = _SETTINGS | {"svg.hashsalt": name}
    with warnings.catch_warnings(), matplotlib.rc_context(settings):
        warnings.simplefilter("ignore", UserWarning)  # glyphs that the measuring font lacks; the reader's browser has its own
        draw().savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return Markup(_cleaned(buffer.getvalue(), name, summary, sheet))


def _cleaned(source: bytes, name: str, summary: str, sheet: StyleSheet) -> str:
    from xml.etree import ElementTree

    root = ElementTree.fromstring(source)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith(("}metadata", "}style")):
                parent.remove(child)
    for element in root.iter():
        _clean(element, name, sheet)
    root.attrib = {"viewBox": root.attrib["viewBox"], "class": "chart", "role": "img", "aria-label": summary}
    return ElementTree.tostring(root, encoding="unicode")


def _clean(element: Element, name: str, sheet: StyleSheet) -> None:
    element.tag = element.tag.rpartition("}")[2]
    attributes = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
    if style := attributes.pop("style", None):
        attributes["class"] = sheet.class_for(style.replace("url(#", f"url(#{name}-"))
    elif attributes.get("fill") in _THEME:  # the ground of a hatching
        attributes["class"] = sheet.class_for(f"fill: {attributes.pop('fill')}")
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
