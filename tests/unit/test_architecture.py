"""The diagram in docs/explanation/architecture.md matches the imports in the code.

Run pytest with --update to redraw it.
"""

from __future__ import annotations

import re

from scripts import architecture

PAGE = architecture.ROOT / "docs" / "explanation" / "architecture.md"


def test_the_picture_is_that_of_the_code(update: bool) -> None:
    wanted = architecture.picture()
    before = architecture.PICTURE.read_text()
    if update:
        architecture.PICTURE.write_text(wanted)
        return
    assert before == wanted, "redraw it: pytest tests/unit/test_architecture.py --update"


def test_the_way_of_a_cell_goes_through_every_package() -> None:
    named = set(re.findall(r"`(\w+)`", PAGE.read_text()))
    modules = {"agent", "store"}
    assert {name for row in architecture.layers() for name in row} - modules <= named
