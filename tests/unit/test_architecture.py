"""The diagram in docs/explanation/architecture.md matches the imports in the code.

Run pytest with --update to redraw it.
"""

from __future__ import annotations

import re

from scripts.architecture import PAGE, layers, page


def test_the_picture_is_that_of_the_code(update: bool) -> None:
    wanted = page()
    if update:
        PAGE.write_text(wanted)
    assert PAGE.read_text() == wanted, "redraw it: pytest tests/unit/test_architecture.py --update"


def test_the_way_of_a_cell_goes_through_every_package() -> None:
    named = set(re.findall(r"`(\w+)`", PAGE.read_text()))
    modules = {"agent", "store"}
    assert {name for row in layers() for name in row} - modules <= named
