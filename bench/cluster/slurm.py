"""SLURM's commands and job states."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass

from harness.spec.errors import UsageError


def _run(*words: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    if shutil.which(words[0]) is None:
        raise UsageError(
            f"{words[0]} is not on this host: submit from a login node of the cluster, or see the"
            " script with --dry-run"
        )
    return subprocess.run(words, input=given, capture_output=True, text=True, check=False)


def submit(script: str) -> str:
    """Returns the job's id; raises UsageError with sbatch's message if it refuses."""
    done = _run("sbatch", "--parsable", given=script)
    if done.returncode:
        raise UsageError(f"sbatch refused the job: {' '.join(done.stderr.split())}")
    return done.stdout.strip().split(";")[0]


@dataclass(frozen=True)
class JobState:
    """State of a job or array task."""

    job_id: str
    state: str
    reason: str
    nodes: str
    restarts: int
    elapsed: str


def states(job_id: str) -> list[JobState]:
    """Returns the states of a job and its array tasks; empty once SLURM has dropped it, after some
    minutes."""
    if shutil.which("scontrol") is None:
        return []
    done = _run("scontrol", "-o", "show", "job", job_id)
    return (
        []
        if done.returncode
        else [parse(line) for line in done.stdout.splitlines() if line.startswith("JobId=")]
    )


def parse(line: str) -> JobState:
    """Parses one line of `scontrol -o show job`."""
    facts = dict(re.findall(r"(\S+?)=(\S*)", line))
    job_id = facts["JobId"]
    if "ArrayTaskId" in facts:
        job_id = f"{facts['ArrayJobId']}_{facts['ArrayTaskId']}"
    nodes = facts.get("NodeList", "").replace("(null)", "")
    reason = facts.get("Reason", "None").replace("None", "")
    return JobState(
        job_id,
        facts["JobState"],
        reason,
        nodes,
        int(facts.get("Restarts", "0")),
        facts.get("RunTime", ""),
    )
