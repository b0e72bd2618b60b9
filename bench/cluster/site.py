"""Settings of one cluster."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from harness.cell.errors import UsageError, first_error
from harness.cell.yaml_text import parse_yaml, require_keys

ROOT = Path(__file__).parents[2]
HOME = ROOT if (ROOT / "pyproject.toml").is_file() else Path.cwd()
"""Folder in which jobs run: the checkout; the current folder for an installed suite."""
DEFAULT = HOME / "slurm" / "site.yaml"
VARIABLE = "PARALLELISM_BENCH_SITE"
"""Environment variable with the path of the site file."""


class Notify(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, frozen=True)

    mail: str = ""
    """Mail address; needs the command `mail` on the node."""
    webhook: str = ""
    """URL that gets a POST of a JSON object with a key `text`."""
    command: str = ""
    """Program with arguments, without a shell. It gets the outcome (ok, suspected, regression, not
    compared, failed, killed or not begun) as a further argument, and details on stdin."""
    always: bool = False
    """Whether to notify on success too."""


class Nightly(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, frozen=True)

    matrix: str = "nightly"
    """Matrix that runs every night."""
    baseline: str = ""
    """What to compare every night with as well: a run, a folder, or NAME of
    results/reference/NAME."""
    again: str = ""
    """Time of the next start, for sbatch's --begin (`tomorrow`, `02:00`). If empty, the job is not
    submitted again."""
    publish: str = ""
    """Folder of a web server's pages. If empty, reports/html."""
    textfile: str = ""
    """Folder of the Prometheus node exporter's textfile collector. If empty, no metrics are
    written."""
    notify: Notify = Field(default_factory=Notify)


class Site(BaseModel):
    """Settings of one cluster. The defaults are SLURM's."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, frozen=True)

    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    reservation: str = ""
    time: str = ""
    """Time limit in SLURM's format: `04:00:00`, `1-12`."""
    nodes: int = Field(default=1, ge=1)
    gpus_per_node: int = Field(default=0, ge=0)
    """Number of GPUs per node. With 0, the job requests none, and cells run on the CPU if SLURM
    confines devices."""
    gpu_directive: str = "--gpus-per-node={gpus}"
    """Directive that requests GPUs; some sites want `--gres=gpu:a100:{gpus}`."""
    cpus_per_node: int = Field(default=0, ge=0)
    """Number of CPU cores per node. With 0, all cores if `exclusive`, otherwise SLURM's default."""
    memory: str = ""
    """Memory per node for SLURM: `64G`; `0` is all of it."""
    exclusive: bool = True
    """Whether to keep other jobs off the nodes, since they would skew results."""
    exclude: list[str] = Field(default_factory=list)
    """Nodes to leave out, such as ones that nights found slower."""
    switches: str = ""
    """Maximum number of leaf switches between nodes, and how long to wait for them: `1@30:00`."""
    directives: list[str] = Field(default_factory=list)
    """Further #SBATCH lines, verbatim."""
    modules: list[str] = Field(default_factory=list)
    """Environment modules to load, in this order."""
    prologue: list[str] = Field(default_factory=list)
    """Shell lines to run first, such as to activate an environment."""
    container: str = ""
    """Prefix that starts Python in a container: `apptainer exec --nv suite.sif`."""
    python: str = ".venv/bin/python"
    """Python with the suite; relative to the checkout. An installed suite uses its own."""
    srun: list[str] = Field(default_factory=list)
    """Further options of srun for the agents: `--mpi=none`."""
    interface: str = ""
    """Network interface that reaches all nodes, such as `ib0`. If empty, that of the route to the
    first node."""
    warn_seconds: int = Field(default=120, ge=1)
    """Seconds before the time limit at which a job requeues itself."""
    requeues: int = Field(default=20, ge=0)
    """Maximum number of requeues. Without it, a trial longer than the limit would requeue
    forever."""
    nightly: Nightly = Field(default_factory=Nightly)

    @field_validator("gpu_directive")
    @classmethod
    def _check_placeholders(cls, directive: str) -> str:
        try:
            directive.format(gpus=1)
        except (LookupError, ValueError, AttributeError, TypeError):
            raise PydanticCustomError(
                "gpu_directive", "the only placeholder is {gpus}, such as in --gres=gpu:{gpus}"
            ) from None
        return directive

    def without_gpus(self) -> str:
        """Returns a warning if a job requests no GPUs; empty if it requests some."""
        if self.gpus_per_node or any("gpu" in line for line in self.directives):
            return ""
        return (
            "the job requests no GPUs: if SLURM confines devices, its cells run on the CPU even"
            " on GPU nodes; set gpus_per_node in the site file, or give --gpus-per-node N"
        )

    def directive_lines(self) -> list[str]:
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
            "exclude": ",".join(self.exclude),
        }
        lines = [f"--{name}={value}" for name, value in named.items() if value]
        lines += [self.gpu_directive.format(gpus=self.gpus_per_node)] if self.gpus_per_node else []
        lines += ["--exclusive"] if self.exclusive else []
        return lines + self.directives


def read_site(file: Path | None, **given: object) -> Site:
    """Reads `file`, else the environment variable's file, else slurm/site.yaml, else defaults.
    `given` overrides settings. Raises UsageError with the file and the key."""
    named = file or (Path(path) if (path := os.environ.get(VARIABLE)) else None)
    if named and not named.is_file():
        raise UsageError(f"there is no site file {str(named)!r}; see slurm/sites for examples")
    site = named or (DEFAULT if DEFAULT.is_file() else None)
    content: dict[str, object] = {}
    if site:
        content = parse_yaml(site.read_bytes(), f"site file {site}") or {}
        if not isinstance(content, dict):
            raise UsageError(f"site file {site}: must be a mapping such as `partition: gpu`")
        require_keys(content, Site.model_fields, f"site file {site}")
    try:
        options = {name: value for name, value in given.items() if value is not None}
        return Site.model_validate({**content, **options})
    except ValidationError as error:
        raise UsageError(
            f"site file {site}, {first_error(error)}" if site else first_error(error)
        ) from None
