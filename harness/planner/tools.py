"""Reads what people say about a training: options, a tool's defaults, and the tool's own file."""

from __future__ import annotations

import difflib
import functools
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias, get_args, get_type_hints

import yaml

from harness.cell.errors import UsageError
from harness.planner.cluster.recipe import ALL_LINEAR, OPTIMIZERS, Recipe, named, plain
from harness.planner.fits import Method

DERIVED = ("adapter", "gpus")
"""Fields of a recipe that follow from others."""
Row: TypeAlias = dict[str, Any]
"""Fields of a tool."""
FIELDS: Row = {
    "model": str,
    "method": Method,
    "rank": int,
    "targets": tuple,
    **{name: kind for name, kind in get_type_hints(Recipe).items() if name not in DERIVED},
}
"""Fields that people can set, and their types: those of a recipe, and what it follows from."""


@functools.cache
def _table() -> dict[str, Row]:
    text = Path(__file__).with_name("tools.yaml").read_text(encoding="utf-8")
    table: dict[str, Row] = yaml.safe_load(text)
    return table


def tool_names() -> tuple[str, ...]:
    return tuple(_table()["tools"])


def tool_fields(tool: str, method: str) -> dict[str, str]:
    """Returns what a tool does by default with a method; raises UsageError for an unknown tool."""
    parts = _table()["tools"][named("tool", tool, tool_names())]
    of_method = parts.get("full" if method == "full" else "adapter", {})
    return {name: str(value).lower() for name, value in {**parts["all"], **of_method}.items()}


def config_fields(file: Path) -> dict[str, str]:
    """Returns the fields that a tool's YAML, JSON or arguments set, ignoring all other keys.

    Raises UsageError if the file is unreadable or sets no field.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read config {str(file)!r}: {error}") from None
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError:
        content = None
    entries = dict(_flat(content) if isinstance(content, dict) else _arguments(text))
    found: dict[str, str] = {}
    for field in FIELDS:
        for key in (field, *_table()["keys"].get(field, ())):
            value = str(entries.get(key.replace("-", "_"), "")).strip()
            if value and value.lower() not in ("none", "null", "auto") and field not in found:
                found[field] = value
    _quantised(entries, found)
    if not found:
        raise UsageError(
            f"config {str(file)!r} sets nothing that changes memory or speed; give the file of a"
            " trainer, such as axolotl's YAML, or its arguments"
        )
    return found


def _quantised(entries: Mapping[str, object], found: dict[str, str]) -> None:
    """Sets what flags for 4 and 8 bits mean, and the method if it only follows from other keys."""
    on = {key for key in entries if str(entries[key]).lower() in ("true", "1")}
    if found.get("base", "").lower() in ("true", "false"):
        del found["base"]
    if "load_in_8bit" in on:
        found["base"] = "8bit"
    if "load_in_4bit" in on:
        found["base"] = "4bit"
    if found and "method" not in found:
        found["method"] = "lora" if {"rank", "targets"} & {*found} or "use_peft" in on else "full"


def _flat(content: Mapping[object, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in content.items():
        name = f"{prefix}{str(key).replace('-', '_')}"
        if isinstance(value, dict):
            yield from _flat(value, f"{name}.")
        else:
            yield name, " ".join(map(str, value)) if isinstance(value, list) else value


def _arguments(text: str) -> Iterator[tuple[str, object]]:
    arguments = shlex.split(text, comments=True)
    for place, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            follows = arguments[place + 1] if place + 1 < len(arguments) else "--"
            implied = "true" if follows.startswith("--") else follows
            yield name.lstrip("-").replace("-", "_"), value if equals else implied


def field_named(name: str) -> str:
    """Returns the field that a name, or a tool's key, stands for; raises UsageError if unknown."""
    key = name.strip().lower().replace("-", "_")
    for field in FIELDS:
        if key == field or key in _table()["keys"].get(field, ()):
            return field
    near = difflib.get_close_matches(key, FIELDS, 1)
    hint = f"did you mean {near[0]}?" if near else f"give one of {', '.join(FIELDS)}"
    raise UsageError(f"unknown field {name!r}; {hint}")


def parsed(field: str, text: str) -> object:
    """Returns a field's value from what a person or a tool calls it; raises UsageError."""
    value = str(_table()["values"].get(field, {}).get(plain(text), text))
    if field == "targets":
        return _targets(value)
    kind = FIELDS[field]
    if kind is int:
        return whole(field, value)
    if kind is bool:
        if plain(value) in ("true", "yes", "on", "1", "false", "no", "off", "0"):
            return plain(value) in ("true", "yes", "on", "1")
        raise UsageError(f"{field} {text!r}: give yes or no")
    choices = [*OPTIMIZERS] if field == "optimizer" else _choices(kind)
    found = [name for name in choices if plain(name) == plain(value)]
    if choices and not found:
        raise UsageError(f"{field} {text!r}: give one of {', '.join(choices)}")
    return found[0] if found else value


def _choices(kind: object) -> list[str]:
    return [
        choice
        for part in get_args(kind)
        for choice in (get_args(part) or (part,))
        if isinstance(choice, str)
    ]


def whole(field: str, text: object, most: int = 10**6) -> int:
    """Returns a whole number such as `2048`, `32k` or `1,024`; k means 1,024. Raises UsageError."""
    match = re.fullmatch(r"(\d[\d,_]*)\s*(k?)", str(text).strip().lower())
    number = int(re.sub(r"\D", "", match[1])) * (1024 if match[2] else 1) if match else 0
    if not 1 <= number <= most:
        raise UsageError(f"{field} {text!r}: give a whole number, 1 to {most}, such as 2048 or 32k")
    return number


def _targets(text: str) -> tuple[str, ...]:
    if text == "all":
        return ALL_LINEAR
    usual = {"output": "o", "wo": "o", "w1": "gate", "w2": "down", "w3": "up", "query": "q"}
    parts = re.findall(r"[\w.]+", text.lower())
    short = [re.sub(r".*\.|_proj$|^lora_", "", part) for part in parts]
    matrices = [usual.get(name, name) for name in short]
    if unknown := [name for name in matrices if name not in ALL_LINEAR]:
        raise UsageError(
            f"targets {text!r}: {unknown[0]!r} is neither all nor one of {', '.join(ALL_LINEAR)}"
        )
    # A matrix that joins others is a target if any of them is.
    joined = {"qkv": {"q", "k", "v"}, "gate_up": {"gate", "up"}}
    matrices += [name for name, parts in joined.items() if parts & {*matrices}]
    return tuple(name for name in ALL_LINEAR if name in matrices)
