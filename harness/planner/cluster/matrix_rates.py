from __future__ import annotations

import functools
from pathlib import Path

import yaml
from pydantic import TypeAdapter

USUAL_SHARE = 0.8
"""Share of peak assumed for an unmeasured device's best matrix product."""


@functools.cache
def best_products() -> dict[str, float]:
    """Reads the TFLOP/s of each device's best matrix product from hardware.yaml."""
    text = Path(__file__).parents[1].joinpath("hardware.yaml").read_text(encoding="utf-8")
    table = TypeAdapter(dict[str, float])
    return table.validate_python(yaml.safe_load(text)["best_products"])
