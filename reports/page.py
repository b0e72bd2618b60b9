"""The view -> one HTML text that loads nothing and runs nothing but its own script."""

from __future__ import annotations

import base64
import gc
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.record.store import Results

TEMPLATES = Path(__file__).parent / "templates"


def render(results: Results) -> str:
    """The page of one run.

    Its content policy allows the one style and the one script by their hashes.
    """
    from reports.groups import marks, named, pareto
    from reports.table import disturbance, disturbance_legend, gpu_findings
    from reports.view import make_view

    collecting = gc.isenabled()
    # What a page is made of is kept until it is done: looking for garbage took an eighth of the
    # time.
    gc.disable()
    try:
        view = make_view(results)
        return fill(
            "report.html.j2",
            view.figure_styles,
            view=view,
            named=named,
            marks=marks,
            pareto=pareto,
            disturbance=disturbance,
            disturbance_legend=disturbance_legend,
            gpu_findings=gpu_findings,
        )
    finally:
        if collecting:
            gc.enable()


def fill(template: str, more_style: str = "", **values: Any) -> str:
    """A template with the one style, the one script and these values; everything in them is
    escaped."""
    import jinja2
    from markupsafe import Markup

    from reports import text

    style = f"\n{(TEMPLATES / 'style.css').read_text(encoding='utf-8')}\n{more_style}\n"
    script = f"\n{(TEMPLATES / 'script.js').read_text(encoding='utf-8')}\n"
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
        script_hash=digest(script),
    )
    return text.printable(page)


def digest(content: str) -> str:
    """A source expression of the content security policy (W3C CSP 3, section 2.3.1)."""
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"
