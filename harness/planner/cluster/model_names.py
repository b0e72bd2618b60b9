from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import yaml

from harness.planner.cluster.hf_config import FAMILIES, from_config
from harness.planner.cluster.model_shape import ModelShape
from harness.spec.errors import UsageError


@functools.cache
def named_shapes() -> dict[str, ModelShape]:
    text = Path(__file__).parents[1].joinpath("models.yaml").read_text(encoding="utf-8")
    rows = yaml.safe_load(text)["models"]
    codes = {row["name"]: FAMILIES[row.pop("code")].code for row in rows if "code" in row}
    return {row["name"]: ModelShape(code=codes.get(row["name"]), **row) for row in rows}


def parse_shape(text: str) -> ModelShape:
    """Parses a name, `hf:PATH` (a config.json or its folder) or `layers=32,hidden=4096,...`.

    Raises UsageError for anything else.
    """
    if text in named_shapes():
        return named_shapes()[text]
    if text.startswith("hf:"):
        return from_config(Path(text.removeprefix("hf:")))
    if "=" in text:
        return _from_sizes(text)
    raise UsageError(
        f"unknown model {text!r}; known are {', '.join(named_shapes())}; or give hf:PATH of a"
        " config.json, or sizes such as layers=32,hidden=4096,heads=32"
    )


_SIZES = [f.name for f in dataclasses.fields(ModelShape) if f.type in ("int", "bool")]
_FLAGS = [field.name for field in dataclasses.fields(ModelShape) if field.type == "bool"]


def _from_sizes(text: str) -> ModelShape:
    values: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in _SIZES:
            raise UsageError(f"unknown model size {name!r}; known are {', '.join(_SIZES)}")
        if not re.fullmatch(r"\d+", value):
            raise UsageError(
                f"model size {name}={value!r} is not a whole number; give it as digits"
            )
        if name in values:
            raise UsageError(f"model {text!r}: {name} is given twice; give it once")
        values[name] = int(value)
        if not values[name] and name not in _FLAGS:
            raise UsageError(f"model {text!r}: {name} is 0; give at least 1")
    if missing := [name for name in ("layers", "hidden") if name not in values]:
        raise UsageError(f"model {text!r}: give {' and '.join(missing)} as well")
    hidden = values["hidden"]
    defaults = {
        "heads": max(1, hidden // 128),
        # As in Llama: 8/3 of the hidden size, rounded up to a multiple of 256.
        "feed_forward": -(-8 * hidden // 3 // 256) * 256,
        "vocabulary": 128256,
    }
    sizes: dict[str, Any] = defaults | values
    sizes |= {name: bool(values[name]) for name in _FLAGS if name in values}
    return ModelShape(name=text, **sizes)
