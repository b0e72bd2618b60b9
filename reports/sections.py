"""Some sections of a finished page, and the page laid out for print.

Text of a record cannot be taken for tags: it is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from harness.spec.errors import UsageError
from reports.page import TEMPLATES, digest

_TAG = r'<section (?:[^<>]* )?aria-labelledby="([\w-]+)"[^<>]*>'
_SECTION = re.compile(_TAG + r".*?</section>\n*", re.DOTALL)


def known(template: str) -> list[str]:
    """Names of all sections that a template has, those of what it includes among them, in the order
    of the page."""
    source = (TEMPLATES / template).read_text(encoding="utf-8")
    whole = re.sub(
        r'{% include "([\w.]+)" %}',
        lambda found: (TEMPLATES / found[1]).read_text(encoding="utf-8"),
        source,
    )
    return re.findall(_TAG, whole)


def require_known(wanted: Sequence[str], names: Sequence[str]) -> None:
    """Raises UsageError for a section that no page of this kind has."""
    for name in wanted:
        if name not in names:
            raise UsageError(
                f"--section {name!r} is no section of this report; its sections are"
                f" {', '.join(names)}"
            )


def require_some(wanted: Sequence[str], there: Collection[str]) -> list[str]:
    """Those of the wanted sections that the report lacks for want of data; raises UsageError where
    it lacks all.
    """
    absent = [name for name in wanted if name not in there]
    if wanted and len(absent) == len(wanted):
        raise UsageError(
            f"--section {', '.join(wanted)}: this report has no data for it; it has"
            f" {', '.join(there)}"
        )
    return absent


def chosen(page: str, wanted: Sequence[str]) -> tuple[str, list[str]]:
    """The page with these sections only, in its own order, and which of them it lacks.

    Links to what is gone become text.
    """
    absent = require_some(wanted, _SECTION.findall(page))
    page = _SECTION.sub(lambda found: found[0] if found[1] in wanted else "", page)
    ids = set(re.findall(r' id="([^"]+)"', page))
    page = re.sub(
        r'<li><a href="#([\w-]+)">[^<]*</a></li>',
        lambda found: found[0] if found[1] in ids else "",
        page,
    )
    first = next(name for name in _SECTION.findall(page))
    page = re.sub(
        r'(<a class="skip" href="#)[\w-]+(">)[^<]*',
        rf"\g<1>{first}\g<2>Skip to the first section",
        page,
    )
    return (
        re.sub(
            r'(<a [^<>]*?) href="#([^"]+)"',
            lambda found: found[0] if found[2] in ids else found[1],
            page,
        ),
        absent,
    )


def for_print(page: str) -> str:
    """The page as it is printed, on screens too: light, every detail open, nothing to click, no
    script."""
    before, style, after = re.split(
        r"(?<=<style>)(.*?)(?=</style>)", page, maxsplit=1, flags=re.DOTALL
    )
    light = style.replace(
        "@media screen and (prefers-color-scheme: dark)", "@media not all"
    ).replace("@media print", "@media all")
    light = light.replace("color-scheme: light dark", "color-scheme: light")
    before = before.replace(digest(style), digest(light)).replace(
        'content="light dark"', 'content="light"'
    )
    before = re.sub(r"script-src '[^']*'", "script-src 'none'", before)
    after = re.sub(r"<script>.*?</script>\n?", "", after, flags=re.DOTALL)
    return before + light + re.sub(r"<details(?! open)", "<details open", after)
