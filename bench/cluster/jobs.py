"""Batch scripts, submission and states of SLURM jobs."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.cluster.site import HOME, ROOT, Site
from harness.cell.durable import sealed, unsealed
from harness.cell.errors import DamagedFileWarning, UsageError
from harness.cell.yaml_text import parsed
from harness.record.plan import matrix_name

SCRIPTS = Path(__file__).with_name("slurm")


@dataclass(frozen=True)
class ClusterJob:
    matrix: str
    run_id: str
    """Id of the run. If empty, the job chooses it."""
    results: Path
    options: tuple[str, ...] = ()
    tasks: int = 0
    """Number of array tasks that share the cells. 0 means that the job is no array."""
    nightly: bool = False

    @property
    def name(self) -> str:
        return f"bench-{'nightly-' if self.nightly else ''}{Path(self.matrix).stem}"

    @property
    def folder(self) -> Path:
        nightly = Path("nightly", matrix_name(self.matrix))
        return self.results / "slurm" / (self.run_id or nightly)


def batch_script(site: Site, job: ClusterJob) -> str:
    """Returns a batch script: options, the site's setup, and a script of bench/cluster/slurm/."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    return environment.get_template("job.sh.j2").render(
        site=site,
        job=job,
        home=HOME,
        scripts=SCRIPTS,
        lines=_lines(site, job),
        variables=_variables(site, job),
        python=_python(site),
    )


def _lines(site: Site, job: ClusterJob) -> list[str]:
    """Returns sbatch's options; the job survives a time limit, lost node or requeue."""
    log = "%A_%a" if job.tasks else "%j"
    return [
        f"--job-name={job.name}",
        f"--output={job.folder / f'slurm-{log}.log'}",
        "--open-mode=append",
        "--requeue",
        "--no-kill",
        "--ntasks-per-node=1",
        f"--signal=B:USR1@{site.warn_seconds}",
        *([f"--array=0-{job.tasks - 1}"] if job.tasks else []),
        *site.directive_lines(),
    ]


def _python(site: Site) -> str:
    if "python" not in site.model_fields_set and HOME != ROOT:
        return sys.executable
    return site.python if "/" not in site.python else str(HOME / site.python)


def _variables(site: Site, job: ClusterJob) -> Mapping[str, str]:
    variables: dict[str, str | int | Path] = {
        "BENCH_MATRIX": job.matrix,
        "BENCH_RUN": job.run_id,
        "BENCH_RESULTS": job.results,
        "BENCH_WORK": job.folder,
        "BENCH_NODES": site.nodes,
        "BENCH_GPUS": "" if site.without_gpus() else site.gpus_per_node or "some",
        "BENCH_PYTHON": _python(site),
        "BENCH_CONTAINER": site.container,
        "BENCH_SRUN": _quoted(site.srun),
        "BENCH_INTERFACE": site.interface,
        "BENCH_REQUEUES": site.requeues,
        "BENCH_OPTIONS": _quoted(job.options),
    }
    if job.nightly:
        variables["BENCH_AGAIN"] = site.nightly.again
    return {name: str(value) for name, value in variables.items()}


def _quoted(arguments: Sequence[str]) -> str:
    return " ".join(shlex.quote(word) for word in arguments)


def _run(*arguments: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    if shutil.which(arguments[0]) is None:
        raise UsageError(
            f"{arguments[0]} is not installed on this host: submit from a login node of the"
            " cluster, or see the script with --dry-run"
        )
    return subprocess.run(arguments, input=given, capture_output=True, text=True, check=False)


def sbatch(script: str) -> str:
    """Returns the job's id; raises UsageError if sbatch refuses."""
    done = _run("sbatch", "--parsable", given=script)
    if done.returncode:
        raise UsageError(f"sbatch refused the job: {' '.join(done.stderr.split())}")
    return done.stdout.strip().split(";")[0]


@dataclass(frozen=True)
class JobState:
    job_id: str
    state: str
    reason: str
    nodes: str
    restarts: int
    elapsed: str


def states(job_id: str) -> list[JobState]:
    """Returns the states of a job and its tasks. SLURM forgets them minutes after the job's end;
    they are then empty."""
    if shutil.which("scontrol") is None:
        return []
    done = _run("scontrol", "-o", "show", "job", job_id)
    lines = [] if done.returncode else done.stdout.splitlines()
    return [parse(line) for line in lines if line.startswith("JobId=")]


def parse(line: str) -> JobState:
    facts = dict(re.findall(r"(\S+?)=(\S*)", line))
    job_id = facts["JobId"]
    if "ArrayTaskId" in facts:
        job_id = f"{facts['ArrayJobId']}_{facts['ArrayTaskId']}"
    return JobState(
        job_id,
        facts["JobState"],
        facts.get("Reason", "None").replace("None", ""),
        facts.get("NodeList", "").replace("(null)", ""),
        int(facts.get("Restarts", "0")),
        facts.get("RunTime", ""),
    )


@dataclass(frozen=True)
class Submission:
    job: str
    run_id: str
    matrix: str
    nodes: int
    tasks: int

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def keep_submission(submission: Submission, folder: Path) -> None:
    with open(folder / "submitted.jsonl", "a") as file:
        file.write(sealed(submission.as_json()).replace("\n", "\t", 1))
        file.flush()
        os.fsync(file.fileno())


def submissions(results: Path) -> list[Submission]:
    """Returns recorded submissions; leaves out damaged lines, with a warning."""
    found = []
    for file in sorted((results / "slurm").rglob("submitted.jsonl")):
        for line in re.findall(rb"[^\n]+\n?", file.read_bytes()):
            try:
                # Earlier versions wrote no digest. `index` raises ValueError if a line was cut off.
                undigested = line[: line.index(b"\n")]
                text = unsealed(line.replace(b"\t", b"\n")) if b"\t" in line else undigested
                found.append(parsed(Submission, text))
            except ValueError:
                text = f"{str(file)!r} is damaged: a line is left out"
                warnings.warn(text, DamagedFileWarning, stacklevel=2)
    return found
