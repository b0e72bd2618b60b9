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


def test_every_package_has_its_box_and_all_arrows_go_down() -> None:
    edges = architecture.edges()
    boxes = architecture.placed(edges)
    assert boxes.keys() == edges.keys() | {name for targets in edges.values() for name in targets}
    for source, targets in edges.items():
        assert all(boxes[source].row < boxes[target].row for target in targets)


def test_no_two_boxes_overlap() -> None:
    boxes = list(architecture.placed(architecture.edges()).values())
    for one in boxes:
        for other in boxes:
            if one is not other and one.row == other.row:
                assert abs(one.x - other.x) >= architecture.WIDTH


def test_the_way_of_a_cell_goes_through_every_package() -> None:
    named = set(re.findall(r"`(\w+)`", PAGE.read_text()))
    modules = {"agent", "store"}
    assert {name for row in architecture.layers() for name in row} - modules <= named
