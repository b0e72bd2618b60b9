"""Compares the figures of results/reference that answer its questions with a golden file.

`pytest --update` rewrites the file; review its diff like any other.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from harness.record.store import load
from reports.blocks import visible
from reports.html_writer import charts_in
from reports.run_report import ran
from reports.run_sections import SECTIONS

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "figures.json"

KEPT = """
speed memory-of-these strong-0 weak-0 speed-2 states-2 ranks traffic-0 loss-0 bubble
parity_max_loss_deviation parity_max_update_deviation
""".split()  # noqa: SIM905
"""Figures of the answer, of scaling, of the main setting's speed and states, and of parity."""


def rounded(value: Any) -> Any:
    """Rounds to seven digits, since library versions differ only beyond them."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, (list, tuple)) else value


def test_the_data_of_figures_match_the_golden_file(update: bool) -> None:
    seen: dict[str, Any] = {}
    report = ran(load(ROOT / "results" / "reference"))
    for section in SECTIONS:
        blocks = section.blocks(report) if section.runs(report) else []
        for chart in charts_in(visible(blocks, "page")):
            data: Any = chart.data
            assert data.name not in seen, "names are unique in the page"
            values = {"kind": type(data).__name__, **dataclasses.asdict(data)}
            del values["title"], values["summary"]  # sentences, which may be reworded
            seen[data.name] = rounded(values)
    if update:
        lines = [
            f"{json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}"
            for k, v in seen.items()
            if k in KEPT
        ]
        GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    golden = json.loads(GOLDEN.read_text())
    assert sorted(golden) == sorted(KEPT)
    for name, figure in golden.items():
        assert json.loads(json.dumps(seen[name])) == figure, name
