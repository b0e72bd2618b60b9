"""The jobs that were submitted for the runs of a results folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Submission:
    """A submitted job, as one line of submitted.jsonl."""

    job: str
    run_id: str
    """Empty: the job names its run itself once it has begun."""
    matrix: str
    nodes: int
    tasks: int
    """Number of array tasks that share the run's cells; 0: no array."""

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def keep_submission(submission: Submission, folder: Path) -> None:
    """Appends a line to submitted.jsonl in the folder of the run's jobs."""
    with open(folder / "submitted.jsonl", "a") as file:
        file.write(submission.as_json() + "\n")


def submissions(results: Path) -> list[Submission]:
    """Returns all submissions of a results folder, oldest first."""
    files = sorted((results / "slurm").glob("*/submitted.jsonl"))
    return [
        Submission(**json.loads(line)) for file in files for line in file.read_text().splitlines()
    ]
