"""Records of submitted jobs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Submission:
    """A line of submitted.jsonl."""

    job: str
    run_id: str
    """Empty: the job names its run itself once it has begun."""
    matrix: str
    nodes: int
    tasks: int
    """Array tasks that share the run's cells; 0: no array."""

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def keep_submission(submission: Submission, folder: Path) -> None:
    with open(folder / "submitted.jsonl", "a") as file:
        file.write(submission.as_json() + "\n")


def submissions(results: Path) -> list[Submission]:
    """Returns all submissions, oldest first."""
    files = sorted((results / "slurm").glob("*/submitted.jsonl"))
    return [
        Submission(**json.loads(line)) for file in files for line in file.read_text().splitlines()
    ]
