"""One HTML page that loads nothing and runs only its own script."""

from __future__ import annotations

import base64
import functools
import gc
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from reports.panels import Panels
from reports.sections import AnyReport, Section, with_data

TEMPLATES = Path(__file__).parent / "templates"
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Page:
    text: str
    absent: list[str]
    """Wanted sections without data."""


def without_collection(function: Callable[P, T]) -> Callable[P, T]:
    """Disables garbage collection during a call: a page's objects live until it is done, and
    collection took an eighth of the time."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        collecting = gc.isenabled()
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            if collecting:
                gc.enable()

    return run


def section_page(
    template: str,
    report: AnyReport,
    sections: Iterable[Section[AnyReport]],
    wanted: Sequence[str] = (),
    printed: bool = False,
    **values: object,
) -> Page:
    """Returns a page of the wanted sections (all by default). `values`: for its template, which
    receives the sections as `shown`."""
    panels = Panels()
    on_page = [section for section in sections if section.html]

    def make(section: Section[AnyReport]) -> object:
        return section.html(report, panels) if section.html else None

    parts, absent = with_data(on_page, wanted, make)
    panels.pictures.draw()
    shown = {section.name: (section, part) for section, part in parts}
    style = panels.pictures.styles
    text = fill(template, style, printed, report=report, shown=shown, **values)
    return Page(text, absent)


def fill(template: str, more_style: str = "", printed: bool = False, **values: object) -> str:
    """Fills a template with the style, the script and escaped values. The content policy allows
    style and script by their hashes.

    `printed`: use the print layout on screens: light, all details open, no controls, no script.
    """
    import jinja2
    from markupsafe import Markup

    from reports import text

    style = f"\n{(TEMPLATES / 'style.css').read_text(encoding='utf-8')}\n{more_style}\n"
    script = f"\n{(TEMPLATES / 'script.js').read_text(encoding='utf-8')}\n"
    style = _as_printed(style) if printed else style
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(
        number=text.number,
        listed=text.listed,
        plural=text.plural,
        plain=text.plain,
        breakable=text.breakable,
    )
    page = environment.get_template(template).render(
        **values,
        style=Markup(style),
        script=Markup(script),
        style_hash=digest(style),
        script_hash="none" if printed else digest(script),
        printed=printed,
        opened=" open" if printed else "",
    )
    return text.printable(page)


def _as_printed(style: str) -> str:
    changes = {
        "@media screen and (prefers-color-scheme: dark)": "@media not all",
        "@media print": "@media all",
        "color-scheme: light dark": "color-scheme: light",
    }
    for before, after in changes.items():
        style = style.replace(before, after)
    return style


def digest(content: str) -> str:
    """Returns a source expression of the content security policy (W3C CSP 3, section 2.3.1)."""
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"
