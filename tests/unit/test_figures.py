"""The data of every figure of the full run under results/reference, against a golden file.

GOLDEN=write pytest tests/unit/test_figures.py   writes the file anew; its difference is then to be
looked at like any other.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from harness.record.store import load
from reports.run_page import render
from reports.svg import Picture, Pictures

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "figures.json"


def rounded(value: Any) -> Any:
    """Seven digits: what differs between versions of a library does so after them."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, (list, tuple)) else value


def test_the_data_of_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def noted(_: Pictures, draw: Any, shown: Any) -> Picture:
        assert shown.name not in asked, "names are unique in the page"
        asked[shown.name] = rounded({"drawn by": draw.__name__, **dataclasses.asdict(shown)})
        return Picture(draw, shown)

    monkeypatch.setattr(Pictures, "add", noted)
    monkeypatch.setattr(Pictures, "write", noted)
    monkeypatch.setattr(Pictures, "draw", lambda self: None)
    render(load(ROOT / "results" / "reference"))
    if os.environ.get("GOLDEN") == "write":
        GOLDEN.write_text(
            "\n".join(
                [
                    "{",
                    ",\n".join(
                        f"{json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}"
                        for k, v in asked.items()
                    ),
                    "}\n",
                ]
            )
        )
    kept = json.loads(GOLDEN.read_text())
    assert sorted(asked) == sorted(kept)
    for name, shown in json.loads(json.dumps(asked)).items():
        assert shown == kept[name], name
