"""The JSON schema accepts the suite's matrices and rejects wrong ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from bench.cli import app
from bench.matrix import HOME

ROOT = Path(__file__).parents[2]
FILE = ROOT / "bench" / "matrix.schema.json"
MATRICES = sorted(HOME.glob("*.yaml"))


def mistakes(matrix: dict[str, Any]) -> list[str]:
    """Returns the JSON path of each violation of the schema."""
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is missing: make setup")
    found = jsonschema.Draft202012Validator(json.loads(FILE.read_text())).iter_errors(matrix)
    return [error.json_path for error in found]


def test_the_schema_file_matches_the_command(update: bool) -> None:
    printed = CliRunner().invoke(app, ["schema"]).stdout
    if update:
        FILE.write_text(printed)
    assert json.loads(printed) == json.loads(FILE.read_text())


def test_the_schema_of_site_files_accepts_the_examples() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is missing: make setup")
    schema = json.loads(CliRunner().invoke(app, ["schema", "site"]).stdout)
    check = jsonschema.Draft202012Validator(schema)
    for file in (ROOT / "slurm" / "sites").glob("*.yaml"):
        assert list(check.iter_errors(yaml.safe_load(file.read_text()))) == []
    assert list(check.iter_errors({"nightly": {"matrx": "full"}}))


@pytest.mark.parametrize("file", MATRICES, ids=lambda file: file.stem)
def test_every_matrix_names_the_schema_and_fits_it(file: Path) -> None:
    key, _, named = file.read_text().splitlines()[0].partition("=")
    assert key == "# yaml-language-server: $schema"
    assert (file.parent / named).resolve() == FILE
    assert mistakes(yaml.safe_load(file.read_text())) == []


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"trails": 3}, "$"),
        ({"trials": 0}, "$.trials"),
        ({"cells": []}, "$.cells"),
        ({"cells": [{"strategyy": "ddp"}]}, "$.cells[0]"),
        ({"defaults": {"global_batch": 8}}, "$.defaults"),
        ({"hosts": [{"device": "tpu"}]}, "$.hosts[0].device"),
    ],
)
def test_a_wrong_matrix_does_not_fit(change: dict[str, Any], path: str) -> None:
    right = {"cells": [{"strategy": "ddp", "devices": [1, "many"]}]}
    assert mistakes(right) == []
    assert any(found.startswith(path) for found in mistakes(right | change))
