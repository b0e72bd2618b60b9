"""The data of every figure of the full run under results/reference, against a golden file.

`pytest --update` writes the file anew; look at its difference like at any other.
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


def rounded(value: Any) -> Any:
    """Seven digits: what differs between versions of a library does so after them."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, (list, tuple)) else value


def test_the_data_of_every_figure(update: bool) -> None:
    seen: dict[str, Any] = {}
    report = ran(load(ROOT / "results" / "reference"))
    for section in SECTIONS:
        blocks = section.blocks(report) if section.runs(report) else []
        for chart in charts_in(visible(blocks, "page")):
            data: Any = chart.data
            assert data.name not in seen, "names are unique in the page"
            seen[data.name] = rounded({"kind": type(data).__name__, **dataclasses.asdict(data)})
    if update:
        lines = [f"{json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in seen.items()]
        GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    kept = json.loads(GOLDEN.read_text())
    assert sorted(seen) == sorted(kept)
    for name, shown in json.loads(json.dumps(seen)).items():
        assert shown == kept[name], name
