"""Exports a cell as files that run the same training outside the suite."""

from __future__ import annotations

import functools
import inspect
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.cell.cell import Cell
from harness.cell.errors import Refused, Unavailable, UsageError
from harness.host.environment import version_of
from harness.seam.base import Export, Strategy
from harness.seam.job import LOSS_SCALE, Job
from harness.seam.optimizers import EXTRA_OPTIMIZERS, PACKAGES, muon_arguments, packages_of
from harness.seam.registry import make_strategy, strategies, validate
from harness.workloads import make_workload, prepare_data
from harness.workloads.training_data import SPREAD_EVERY, SPREAD_STEPS
from harness.workloads.workload import has_weights
from harness.workloads.workload_variants import (
    ADAPTERS,
    FLOAT8,
    PROMPTS,
    VIRTUAL_TOKENS,
    adapter_config,
)

if TYPE_CHECKING:
    from harness.workloads import Workload

TARGETS = {
    "spawn": "torch.multiprocessing.spawn, called by the script itself",
    "torchrun": "torchrun, torch's elastic launcher, on this machine",
    "slurm": "a batch script that starts torchrun on every node",
    "accelerate": "accelerate launch, from its config.yaml",
    "deepspeed": "the deepspeed launcher, from a ds_config.json",
    "mpirun": "Open MPI's mpirun, with the arguments of Horovod's documentation",
    "horovodrun": "horovodrun, Horovod's launcher, over Gloo or MPI",
}
_COMMANDS = {
    "torchrun": (
        'exec torchrun --standalone --nproc-per-node {processes} {arguments} train.py{tokens} "$@"'
    ),
    "slurm": 'exec sbatch "$@" job.sbatch',
    "spawn": 'exec python train.py{tokens} "$@"',
    "accelerate": (
        'exec accelerate launch --config_file accelerate_config.yaml train.py{tokens} "$@"'
    ),
    "deepspeed": (
        "exec deepspeed --num_gpus {devices} --no_local_rank --master_port"
        ' "${{MASTER_PORT:-29500}}" train.py{tokens} "$@"'
    ),
    "mpirun": 'exec mpirun {arguments} python train.py{tokens} "$@"',
    "horovodrun": 'exec horovodrun {arguments} python train.py{tokens} "$@"',
}
_AUTO = {
    "causal": "AutoModelForCausalLM",
    "classification": "AutoModelForSequenceClassification",
}
"""transformers auto class by workload kind; pretrained models of other kinds have no export."""
_USUAL: dict[str, Any] = {
    "clear": "optimizer.zero_grad()",
    "no_sync": None,
    "no_group": False,
    "local_rank": 'os.environ["LOCAL_RANK"]',
    "saves": False,
    "resumes": False,
    "trained": "model",
    "loss_said": "The loss is the mean over the ranks.",
    "loss_of_all": "total.item() / world",
}
"""Values of templates for strategies that set no others."""
_WHAT = {
    "train.py": "the training script",
    "model.json": "the model's transformers config",
    "run.sh": "the launch command",
    "job.sbatch": "the batch script; your site's directives are at its top",
    "accelerate_config.yaml": "the config of `accelerate launch`",
    "ds_config.json": "DeepSpeed's config",
}


def known_target(to: str) -> str:
    """Returns a target's description; raises UsageError if it is unknown."""
    if to not in TARGETS:
        raise UsageError(f"unknown target {to!r}; use one of {', '.join(TARGETS)}")
    return TARGETS[to]


def first_target(cell: Cell) -> str:
    """Returns the target whose launcher is nearest to the cell's own; `torchrun` if there is no
    export."""
    strategy = make_strategy(cell)
    return next((to for to in TARGETS if plan_of(strategy, cell, to)), "torchrun")


def export_files(cell: Cell, to: str) -> tuple[dict[str, str], str]:
    """Returns file contents by name, and what this host lacks to run them; raises UsageError if the
    cell has no export."""
    known_target(to)
    workload, note = make_workload(cell.workload), ""
    try:
        validate(cell, workload)
    except Refused as no:
        raise UsageError(f"{cell.name} cannot run: {no}") from None
    except Unavailable as no:
        note = str(no)
    if not _spans_nodes(cell, to):
        raise UsageError(
            f"{cell.name} has no export to {to}, which starts ranks on one node only; use slurm"
        )
    strategy = make_strategy(cell)
    plan = plan_of(strategy, cell, to)
    if plan is None:
        raise UsageError(_no_export(cell, strategy, to))
    _require_plain(cell, workload)
    values = _values(cell, workload, strategy) | plan.values
    values["saves"] = values["saves"] and not unsaved(cell)
    values["spawns"] = to == "spawn"
    values["variables"] = {"OMP_NUM_THREADS": str(cell.threads_per_device), **plan.variables}
    values["arguments"] = shlex.join(plan.arguments)
    command = _COMMANDS[to].format(tokens=values["tokens_argument"], devices=cell.devices, **values)
    values["command"] = command.replace("  ", " ")
    templates = _templates(_file(strategy).parent / "templates")
    files = {
        "train.py": templates.get_template(plan.template).render(values),
        "model.json": _model_json(workload),
        **plan.files,
    }
    files["run.sh"] = templates.get_template("run.sh.j2").render(
        values if to != "slurm" else values | {"variables": {}}
    )
    if to == "slurm":
        files["job.sbatch"] = templates.get_template("job.sbatch.j2").render(values)
    needs = ("torch", "transformers", *strategy.requires, *workload.requires, *packages_of(cell))
    needs = (*needs, *plan.needs)
    values["needs"] = list(dict.fromkeys(needs))
    values["versions"] = ", ".join(
        f"{name} {version_of(name)}" for name in values["needs"] if version_of(name)
    )
    values["described"] = {name: _WHAT[name] for name in files}
    files["README.md"] = templates.get_template("README.md.j2").render(values)
    return files, note


def _require_plain(cell: Cell, workload: Workload) -> None:
    if workload.kind == "custom":
        raise UsageError(
            f"{cell.workload} has no export: its model is not a plain transformers model; use a"
            " transformers workload"
        )
    if workload.pretrained and workload.kind not in _AUTO:
        raise UsageError(
            f"{cell.workload} has no export: no script trains a {workload.kind} model from a config"
            f" file; use a {' or '.join(_AUTO)} model"
        )
    if not set(workload.suffixes) <= {FLOAT8, *ADAPTERS}:
        raise UsageError(
            f"{cell.workload} has no export: its model is not a plain transformers model; use a"
            f" workload without +{workload.suffixes[0]}"
        )


def plan_of(strategy: Strategy, cell: Cell, to: str) -> Export | None:
    """Returns the strategy's export; None if it has none. A strategy without a method `export` has
    one to torchrun if a template has its file's name. Ignores inherited exports, which train
    differently."""
    plan = _plan_or_reason(strategy, cell, to)
    return None if isinstance(plan, Refused) else plan


def _plan_or_reason(strategy: Strategy, cell: Cell, to: str) -> Export | Refused | None:
    if cell.recipe:
        return Refused(f"no standalone script trains with {cell.recipe}; leave it out")
    for axis in ("loss", "activations"):
        if cell.is_set(axis):
            return Refused(f"no standalone script has {axis} {getattr(cell, axis)}; leave it out")
    if not _spans_nodes(cell, to) or (to == "spawn" and cell.launcher != "spawn"):
        return None
    try:
        asked, file = "torchrun" if to == "spawn" else to, _file(strategy)
        if "export" in vars(type(strategy)):
            return strategy.export(cell, asked)
        plain = f"{file.stem}.py.j2"
        if asked not in ("torchrun", "slurm") or not (file.parent / "templates" / plain).exists():
            return None
        if stand_in := strategy.stand_in(cell):
            raise Refused(f"this device only has a stand-in for {cell.strategy}: {stand_in}")
        return Export(plain)
    except Refused as reason:
        return reason


def _file(strategy: Strategy) -> Path:
    return Path(inspect.getfile(type(strategy)))


def why_not(cell: Cell) -> str:
    """Returns why a cell has no export to any target."""
    strategy = make_strategy(cell)
    reasons = (_plan_or_reason(strategy, cell, to) for to in TARGETS)
    refused = next((str(reason) for reason in reasons if isinstance(reason, Refused)), "")
    return refused or f"no standalone script trains with {cell.strategy}"


def _spans_nodes(cell: Cell, to: str) -> bool:
    return cell.nodes == 1 or to == "slurm"


def taken_by(to: str) -> list[str]:
    """Returns the strategies that export to this target with default options on four devices, which
    is the minimum for 3D parallelism."""
    launcher: Any = "spawn" if to == "spawn" else "elastic"
    plain = {
        name: (kind(), Cell(strategy=name, devices=4, launcher=launcher))
        for name, kind in strategies().items()
        if not any(field.is_required() for field in kind.model_fields.values())
    }
    return [name for name, (strategy, cell) in plain.items() if plan_of(strategy, cell, to)]


def _no_export(cell: Cell, strategy: Strategy, to: str) -> str:
    has = [target for target in TARGETS if plan_of(strategy, cell, target)]
    takes = taken_by(to)
    instead = f"it has one to {', '.join(has)}" if has else "it has none to any launcher"
    reason = _plan_or_reason(strategy, cell, to)
    why = f": {reason}" if isinstance(reason, Refused) else ""
    others = f", and these have one to {to}: {', '.join(takes)}" if takes else ""
    return (
        f"{cell.label} in {cell.precision} on {cell.device} has no export to {to}{why};"
        f" {instead}{others}"
    )


def _values(cell: Cell, workload: Workload, strategy: Strategy) -> dict[str, Any]:
    import torch

    data = prepare_data(cell.data, workload, cell.sequence_length)
    if workload.kind == "image" and data.tokens_file:
        raise UsageError(
            f"{cell.name} has no export: scripts can only generate images; use data: images"
        )
    factory, given = Job(
        cell, workload, strategy.layout(cell.devices), torch.device("cpu"), 0, Path()
    ).optimizer_class()
    package = PACKAGES.get(cell.optimizer)
    named = f"{f'{package}.optim' if package else 'torch.optim'}.{factory.__name__}"
    arguments = _arguments(given)
    config = workload.hf_config()
    saved = workload.pretrained and has_weights(workload.pretrained)
    local = workload.pretrained and Path(workload.pretrained).exists()
    return {
        **_USUAL,
        "cell": cell,
        "scales": cell.precision == "fp16",
        "processes": (processes := strategy.layout(cell.devices).processes),
        "cores_per_process": cell.threads_per_device * max(1, cell.devices // processes),
        "options": strategy.model_dump(),
        "kind": workload.kind,
        "config_class": type(config).__name__,
        "model_class": (
            workload.family.model_class
            if workload.family and not workload.pretrained
            else _AUTO[workload.kind]
        ),
        "from_config": ".from_config" if workload.pretrained else "",
        "pretrained": (
            saved
            and (str(Path(workload.pretrained or "").resolve()) if local else workload.pretrained)
        ),
        "workload": workload,
        "every_block": ", ".join(
            f"*model.get_submodule({json.dumps(path)})" for path in workload.block_paths
        ),
        "ranges": [list(pair) for pair in data.ranges],
        "data": data,
        "tokens_argument": ' --tokens "$TOKENS"' if data.tokens_file else "",
        "optimizer": f"{named}(parameters, {arguments})",
        "optimizer_class": named,
        "optimizer_arguments": arguments,
        "optimizer_package": package,
        "muon_arguments": _arguments(muon_arguments(cell)),
        "optimized": "model" if cell.optimizer == "muon" else "model.parameters()",
        "float8": FLOAT8 in workload.suffixes,
        "virtual_tokens": VIRTUAL_TOKENS if {*PROMPTS} & {*workload.suffixes} else 0,
        "adapter": _adapter(workload),
        "autocast": cell.precision != "fp32",
        "dtype": {"bf16": "torch.bfloat16", "fp16": "torch.float16"}.get(cell.precision),
        "loss_scale": LOSS_SCALE,
        "backend": "nccl" if cell.device == "cuda" else "gloo",
    }


def _adapter(workload: Workload) -> str:
    """Returns the adapter's config as source; empty without one."""
    if not (suffixes := [suffix for suffix in workload.suffixes if suffix in ADAPTERS]):
        return ""
    of_gpt2 = workload.family is not None and workload.family.name == "gpt2"
    name, arguments = adapter_config(suffixes[0], transposed=of_gpt2)
    return f"{name}({_arguments(arguments)})"


def unsaved(cell: Cell) -> str:
    """Returns why the cell's script cannot save checkpoints; empty if it can."""
    if cell.precision == "fp16":
        return "the loss scale of fp16 is not saved"
    if cell.optimizer in EXTRA_OPTIMIZERS:
        return f"the states of {cell.optimizer} are not torch's"
    return ""


def _arguments(given: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in given.items())


def _model_json(workload: Workload) -> str:
    config: str = workload.hf_config().to_json_string(use_diff=True)
    return (
        json.dumps(
            {
                k: v
                for k, v in json.loads(config).items()
                if k not in ("transformers_version", "_name_or_path")
            },
            indent=2,
        )
        + "\n"
    )


@functools.cache
def _templates(folder: Path) -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, Path(__file__).parent / "templates"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quote"] = shlex.quote
    environment.filters["tojson"] = json.dumps
    environment.globals |= {"spread_steps": SPREAD_STEPS, "spread_every": SPREAD_EVERY}
    return environment


def require_new_or_empty(folder: Path) -> None:
    if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(
            f"folder {str(folder)!r} exists and is not empty; give another one, or remove it"
        )


def write_files(files: dict[str, str], folder: Path) -> None:
    """Writes all files or none; raises UsageError if the folder is not empty."""
    require_new_or_empty(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise UsageError(f"folder {str(folder)!r} cannot be written: {error.strerror}") from None
    try:
        for name, content in files.items():
            (temporary / name).write_text(content)
            if content.startswith("#!"):
                (temporary / name).chmod(0o755)
        os.umask(mask := os.umask(0))
        temporary.chmod(0o777 & ~mask)
        temporary.replace(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


__all__ = [
    "TARGETS",
    "export_files",
    "first_target",
    "known_target",
    "plan_of",
    "taken_by",
    "write_files",
]
