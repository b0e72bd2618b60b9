"""A comparison as a page and as Markdown: its numbers, and hostile text made harmless."""

from __future__ import annotations

import math
import re

import pytest

from harness.cell.cell import Cell
from reports.runs import markdown, page
from tests.unit.compared_runs import CELL, compared
from tests.unit.html_page import HOSTILE, content_policy
from tests.unit.made_results import left_out, trial_rows


def test_the_page_loads_nothing_and_allows_its_own_script_only() -> None:
    text = page(compared(trial_rows(CELL, [10.0, 10.1]), trial_rows(CELL, [9.0, 9.1])))
    policy = content_policy(text, "style", "script")
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert not re.findall(r"(?:src|href)=\"(?!#)", text)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_only_text(text: str) -> None:
    cell, other = (Cell(strategy=text, devices=2, seed=seed) for seed in range(2))
    was = trial_rows(cell, [10.0, 10.1]) + trial_rows(other, [10.0, 10.1])
    now = trial_rows(cell, [9.0, 9.1]) + left_out(other, "failed", text)
    found = compared(was, now, torch_version=text)
    html = page(found)
    assert html.count("<script>") == 1
    assert "<img" not in html
    assert "1337" not in html
    assert not set(html) & set("\x00\x08\x1b\u202e")
    comment = markdown(found)
    assert "<script" not in comment
    assert "<img" not in comment


def test_markdown_keeps_its_table_whole() -> None:
    odd = trial_rows(Cell(strategy="a|b `c` @someone\n**d**"), [10.0, 10.1])
    text = markdown(
        compared(odd, [row | {"samples_per_second": row["samples_per_second"] / 2} for row in odd])
    )
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {8}
    assert "@" not in text
    assert r"a\|b \`c\` &commat;someone \*\*d\*\*" in text


def test_numbers_of_the_page_are_those_of_the_comparison() -> None:
    found = compared(trial_rows(CELL, [10.0, 10.1]), trial_rows(CELL, [9.0, 9.1]))
    speed = found.lines[0].throughput
    assert speed is not None
    (ratio,) = re.findall(r'data-field="ratio" data-value="([0-9.]+)">0\.9', page(found))
    assert float(ratio) == speed.ratio == pytest.approx(math.sqrt(9.0 * 9.1 / 10.0 / 10.1))
