"""What one cluster needs and others do not: every directive comes from here, nothing about a site
is in the code."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.spec.errors import UsageError, first_error
from harness.spec.yaml_text import parse_yaml

ROOT = Path(__file__).parents[2]
DEFAULT = ROOT / "slurm" / "site.yaml"
VARIABLE = "PARALLELISM_BENCH_SITE"
"""Environment variable with the path of the site file."""


class Notify(BaseModel):
    """Whom the nightly job tells."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    mail: str = ""
    """Address; sent by the command `mail` of the node."""
    webhook: str = ""
    """URL that gets a POST of a JSON object with a key `text`."""
    command: str = ""
    """Command of your own; it gets the outcome in a word as its argument, and what happened on its
    standard input."""
    always: bool = False
    """Also when all is well."""


class Nightly(BaseModel):
    """What the nightly job does beyond a run."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    matrix: str = "quick"
    """Matrix that runs every night."""
    baseline: str = ""
    """A run, a folder, or NAME of results/reference/NAME that every night is compared with, beside
    the last good night."""
    again: str = ""
    """When the next night begins, as sbatch's --begin takes it (`tomorrow`, `02:00`); empty: the
    job does not submit itself."""
    publish: str = ""
    """Folder for the pages of a web server; empty: they stay in reports/html."""
    textfile: str = ""
    """Folder of the Prometheus node exporter's textfile collector; empty: none."""
    notify: Notify = Field(default_factory=Notify)


class Site(BaseModel):
    """One cluster. Everything has a default, which leaves the choice to SLURM."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    reservation: str = ""
    time: str = ""
    """Time limit of a job, as SLURM takes it: `04:00:00`, `1-12`."""
    nodes: int = Field(default=1, ge=1)
    gpus_per_node: int = Field(default=0, ge=0)
    """0: the job asks for none, and where SLURM confines devices its cells run on the CPU, whatever
    the nodes have."""
    gpu_directive: str = "--gpus-per-node={gpus}"
    """How the site asks for GPUs: some want `--gres=gpu:a100:{gpus}`."""
    cpus_per_node: int = Field(default=0, ge=0)
    """CPU cores of each node's part of the job; 0: the whole node with `exclusive`, else SLURM's
    default."""
    memory: str = ""
    """Of each node, as SLURM takes it: `64G`; `0` is all of it."""
    exclusive: bool = True
    """Nobody else on the nodes: numbers with neighbours mean little."""
    switches: str = ""
    """Most leaf switches between the nodes, and how long to wait for them: `1@30:00`."""
    directives: list[str] = Field(default_factory=list)
    """Further lines for #SBATCH, as they are."""
    modules: list[str] = Field(default_factory=list)
    """Loaded in this order."""
    prologue: list[str] = Field(default_factory=list)
    """Lines of shell before anything is started: activate an environment, set variables."""
    container: str = ""
    """Words before the Python command that start it in a container: `apptainer exec --nv
    suite.sif`."""
    python: str = ".venv/bin/python"
    """Python with the suite; a relative path is below the checkout."""
    srun: list[str] = Field(default_factory=list)
    """Further options of the srun that starts the agents: `--mpi=none`."""
    interface: str = ""
    """Network interface that reaches all nodes, `ib0`; empty: the one by which a node reaches the
    first."""
    warn_seconds: int = Field(default=120, ge=1)
    """How long before its end SLURM warns a job, which then stops the current trial and submits
    itself anew."""
    requeues: int = Field(default=20, ge=0)
    """How often a job may begin anew: a trial that needs longer than the time limit would do so for
    ever."""
    nightly: Nightly = Field(default_factory=Nightly)

    def without_gpus(self) -> str:
        """What a job of this site will run on where it asks for no GPUs; empty where it asks."""
        if self.gpus_per_node or any("gpu" in line for line in self.directives):
            return ""
        return (
            "the job asks for no GPUs: where SLURM confines devices its cells run on the CPU,"
            " whatever the nodes have; gpus_per_node in the site file, or --gpus-per-node N, asks"
            " for them"
        )

    def directive_lines(self) -> list[str]:
        """The options of sbatch that the site and the command line gave, in the order of the
        fields."""
        named = {
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "constraint": self.constraint,
            "reservation": self.reservation,
            "time": self.time,
            "nodes": self.nodes,
            "cpus-per-task": self.cpus_per_node,
            "mem": self.memory,
            "switches": self.switches,
        }
        lines = [f"--{name}={value}" for name, value in named.items() if value]
        lines += [self.gpu_directive.format(gpus=self.gpus_per_node)] if self.gpus_per_node else []
        lines += ["--exclusive"] if self.exclusive else []
        return lines + self.directives


def read_site(file: Path | None, **given: object) -> Site:
    """The site of this file, of the variable, of slurm/site.yaml, or the default one; `given`
    options take the place of its values.

    Raises UsageError with the file and the key.
    """
    named = file or (Path(path) if (path := os.environ.get(VARIABLE)) else None)
    if named and not named.is_file():
        raise UsageError(f"site file {str(named)!r} is not there; examples are in slurm/sites")
    site = named or (DEFAULT if DEFAULT.is_file() else None)
    content: dict[str, object] = {}
    if site:
        content = parse_yaml(site.read_bytes(), f"site file {site}") or {}
        if not isinstance(content, dict):
            raise UsageError(f"site file {site}: must be a mapping such as `partition: gpu`")
        for key in content:
            if key not in Site.model_fields:
                near = difflib.get_close_matches(str(key), Site.model_fields, 1)
                raise UsageError(
                    f"site file {site}: unknown key {key!r}"
                    + (f"; did you mean {near[0]!r}?" if near else "")
                )
    try:
        options = {name: value for name, value in given.items() if value is not None}
        return Site.model_validate({**content, **options})
    except ValidationError as error:
        raise UsageError(
            f"site file {site}, {first_error(error)}" if site else first_error(error)
        ) from None
