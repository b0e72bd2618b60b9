"""Which jobs were submitted for the runs of a results folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def submissions(results: Path) -> list[dict[str, Any]]:
    """Oldest first: job, run_id, matrix, nodes, tasks."""
    files = sorted((results / "slurm").glob("*/submitted.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]
