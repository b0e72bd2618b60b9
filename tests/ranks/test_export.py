"""Files that `bench export` writes run on two ranks and give the suite's own losses."""

from __future__ import annotations

import builtins
import itertools
import json
import multiprocessing
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from harness.analysis.consistency import loss_deviations
from harness.export import export_files, write_files
from harness.host.packages import show
from harness.seam.registry import make_strategy
from harness.workloads import make_workload
from tests.ranks.conftest import RunCells, cell

STAND_IN = """#!/usr/bin/env bash
# Stand-in for SLURM's srun where SLURM is not installed: one node, this one.
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""


def environment(**more: str) -> dict[str, str]:
    """Returns variables without the suite on the path, and with the launchers of this Python's
    libraries."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return inherited | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "MASTER_PORT": port,
        **more,
    }


def losses(said: str) -> list[float]:
    # horovodrun begins each line with the rank that printed it.
    lines = re.findall(r'^(?:\[[\d,]+\]<stdout>:)*(\{"step".*\})', said, flags=re.M)
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows] == list(range(len(rows)))
    return [row["loss"] for row in rows]


def run(command: list[str], folder: Path, **more: str) -> str:
    done = subprocess.run(
        command,
        cwd=folder.parent,
        env=environment(**more),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def in_batch(folder: Path) -> str:
    """Submits by sbatch if SLURM answers, else runs the batch script with a stand-in for srun."""
    asked = (
        subprocess.run(["sinfo", "-h", "-o", "%R"], capture_output=True, text=True)
        if shutil.which("sinfo")
        else None
    )
    if asked and asked.returncode == 0 and asked.stdout.strip():
        partition = f"--partition={asked.stdout.split()[0]}"
        run(
            ["bash", str(folder / "run.sh"), "--wait", partition, "--account=", "--output=log"],
            folder,
        )
        return (folder / "log").read_text()
    stand_in = folder.parent / "bin"
    stand_in.mkdir()
    (stand_in / "srun").write_text(STAND_IN)
    (stand_in / "srun").chmod(0o755)
    given = {
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_CPUS_PER_TASK": "2",
    }
    path = f"{stand_in}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "job.sbatch"],
        cwd=folder,
        env=environment(**given) | {"PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


RECORDER = f"""#!{sys.executable} -S
import json, os, sys
print(json.dumps([sys.argv[1:], dict(os.environ)]))
"""
"""Program that prints its arguments and environment."""


def by_warm_ranks(folder: Path, to: str, *arguments: str, killed_after: int | None = None) -> str:
    """Runs the script of `run.sh` in ranks forked from a process that has imported their libraries.

    Launchers start ranks that must import them first, so only STARTED_ANEW runs with launchers.
    Rank 0 gets SIGKILL after `killed_after` steps. Returns the ranks' output.
    """
    programs = folder.parent / "bin"
    programs.mkdir()
    (programs / to).write_text(RECORDER)
    (programs / to).chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    words, variables = json.loads(
        run(["bash", str(folder / "run.sh"), *arguments], folder, PATH=path)
    )
    if to == "accelerate":
        words, variables = up_to_torchrun(words, variables, folder)
    script = words.index("train.py")
    if to == "deepspeed":
        assert words[:3] == ["--num_gpus", words[1], "--no_local_rank"]
        world = int(words[1])
    else:
        assert words[: script - 1] == ["--standalone", "--nproc-per-node"]
        world = int(words[script - 1])
    variables |= {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    log = folder.parent / "log"
    context = multiprocessing.get_context("forkserver")
    ranks = [
        context.Process(
            target=rank_of_script, args=(rank, folder, words[script:], variables, log, killed_after)
        )
        for rank in range(world)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
        if killed_after:
            for other in ranks:
                other.kill()
    ended = [rank.exitcode for rank in ranks]
    expected = [0] * world if killed_after is None else [-signal.SIGKILL, *ended[1:]]
    assert ended == expected, log.read_text()[-3000:]
    return log.read_text()


def up_to_torchrun(
    words: list[str], variables: dict[str, str], folder: Path
) -> tuple[list[str], dict[str, str]]:
    """Returns the arguments and environment with which `accelerate launch` would call torchrun."""
    from accelerate.commands.launch import launch_command, launch_command_parser

    called: list[tuple[list[str], dict[str, str]]] = []

    def torchrun(args: Any) -> None:
        ranks = ["--standalone", "--nproc-per-node", str(args.nproc_per_node)]
        script = [args.training_script, *args.training_script_args]
        called.append((ranks + script, dict(os.environ)))

    assert words[0] == "launch"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.distributed.run.run", torchrun)
        patch.chdir(folder)
        for name, value in variables.items():
            patch.setenv(name, value)
        launch_command(launch_command_parser().parse_args(words[1:]))
    (found,) = called
    return found[0], found[1] | {"MASTER_PORT": variables["MASTER_PORT"]}


def rank_of_script(
    rank: int,
    folder: Path,
    words: list[str],
    variables: dict[str, str],
    log: Path,
    killed_after: int | None,
) -> None:
    os.environ |= {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.chdir(folder)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream.fileno())
    sys.argv = words
    if killed_after:
        kill_itself_after(killed_after)
    show("torchao")  # as in a fresh interpreter
    runpy.run_path(words[0], run_name="__main__")
    sys.stdout.flush()
    os._exit(0)  # torch's threads may outlive the interpreter


def kill_itself_after(steps: int) -> None:
    """Sends SIGKILL to this process once it has printed this many steps."""
    to_screen, printed = builtins.print, itertools.count(1)

    def printing(*values: object, **more: Any) -> None:
        to_screen(*values, **more)
        if str(values[0]).startswith('{"step"') and next(printed) == steps:
            os.kill(os.getpid(), signal.SIGKILL)

    builtins.print = printing


Sets: TypeAlias = list[tuple[str, str, dict[str, Any]]]
STARTED_ANEW: Sets = [
    ("ddp", "torchrun", {"workload": "gpt2-nano", "micro_batches": 2}),
    ("accelerate", "accelerate", {"options": {"engine": "ddp"}, "precision": "bf16"}),
    ("deepspeed", "deepspeed", {"options": {"stage": 0}, "precision": "bf16"}),
    ("ddp_elastic", "torchrun", {"warmup_steps": 3, "timed_steps": 2}),
    ("ddp", "spawn", {"launcher": "spawn"}),
    ("horovod", "horovodrun", {"micro_batches": 2}),
    ("horovod", "mpirun", {"options": {"controller": "mpi", "mpi_yield_when_idle": True}}),
]
"""One set for each launcher that starts its ranks as new interpreters."""
SETS: Sets = [
    *STARTED_ANEW,
    (
        "ddp",
        "torchrun",
        {"workload": "bert-micro", "precision": "fp16", "options": {"static_graph": True}},
    ),
    (
        "three_d",
        "torchrun",
        {"devices": 4, "workload": "gpt2-nano", "micro_batches": 2, "options": {"tensor": 1}},
    ),
    ("single", "torchrun", {"devices": 1, "workload": "resnet-micro", "data": "images"}),
    ("fsdp1", "torchrun", {"micro_batches": 2, "optimizer": "adamw_fused"}),
    ("fsdp2", "torchrun", {"micro_batches": 2, "optimizer": "muon", "options": {"prefetch": True}}),
    ("zero_redundancy", "torchrun", {"workload": "llama-nano+float8"}),
    (
        "distributed_config",
        "torchrun",
        {
            "workload": "mixtral-nano",
            "options": {"expert": 2},
            "micro_batches": 2,
            "recompute": "full",
            "optimizer": "adamw_foreach",  # torch's default on GPUs
        },
    ),
    ("ulysses", "torchrun", {"micro_batches": 2, "recompute": "full"}),
    # SGD's update shows a gradient's scale; AdamW's hides it.
    (
        "ulysses_zero",
        "torchrun",
        {"options": {"stage": 2}, "optimizer": "sgd", "learning_rate": 0.05, "weight_decay": 0.0},
    ),
    ("tensor", "torchrun", {"options": {"sequence_parallel": True}}),
    ("tensor", "torchrun", {"optimizer": "adamw_foreach"}),
    ("tensor", "torchrun", {"workload": "gpt2-nano"}),
    ("ddp", "torchrun", {"workload": "gpt2-nano+ia3"}),
    ("ddp", "torchrun", {"workload": "llama-nano+prompt"}),
    ("fsdp2", "torchrun", {"workload": "llama-nano+lora"}),
    # Tied embeddings: a copy at each end of the pipeline; V schedules have one on rank 0.
    ("pipeline", "torchrun", {"workload": "gpt2-nano", "micro_batches": 2}),
    (
        "pipeline",
        "torchrun",
        {"workload": "gpt2-micro", "micro_batches": 2, "options": {"schedule": "zbv"}},
    ),
    # No parameter is a DTensor between forward passes; during one, other objects replace them.
    (
        "three_d",
        "torchrun",
        {
            "devices": 4,
            "micro_batches": 2,
            "recompute": "full",
            "options": {"data_axis": "zero1", "pipeline": 1},
        },
    ),
    ("ddp", "slurm", {"recompute": "selective", "optimizer": "adamw_8bit"}),
    ("ddp", "accelerate", {"micro_batches": 2, "options": {"comm_hook": "powersgd"}}),
    ("fsdp2", "accelerate", {"recompute": "full"}),
    ("amp", "torchrun", {"precision": "bf16", "options": {"opt_level": "O2"}}),
    ("amp", "torchrun", {"precision": "bf16", "options": {"opt_level": "O3"}}),
    ("collectives", "torchrun", {"options": {"average": "parameters", "period": 2}}),
    ("post_local_sgd", "torchrun", {"options": {"start_step": 2, "period": 2}}),
    ("fairscale_oss", "torchrun", {"micro_batches": 2}),
    ("vertical", "torchrun", {}),
    ("deepspeed_pipeline", "torchrun", {"workload": "gpt2-nano", "micro_batches": 2}),
    ("tiled_linear", "torchrun", {}),
    ("trainer", "torchrun", {"micro_batches": 2}),
    ("trainer", "torchrun", {"options": {"engine": "zero3"}}),
    ("diloco", "torchrun", {}),
    ("deepspeed_auto", "torchrun", {"workload": "mixtral-nano", "options": {"split": "experts"}}),
    ("parameter_server", "torchrun", {"options": {"mode": "synchronous", "transport": "tcp"}}),
    ("accelerate", "accelerate", {"options": {"engine": "zero3"}, "micro_batches": 2}),
    ("deepspeed", "accelerate", {"options": {"stage": 1}}),
    (
        "deepspeed",
        "deepspeed",
        {"options": {"stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"}},
    ),
]
LEAST_PLAIN = (
    {"data_axis": "zero1", "pipeline": 1},
    {"schedule": "zbv"},
    {"expert": 2},
    {"prefetch": True},
    {"engine": "zero3"},
    {"stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
)
QUICK = [one for one in SETS if one[1] == "slurm" or one[2].get("options") in LEAST_PLAIN]
"""The least plain set for each program that starts the ranks, and for each kind of script."""


@pytest.mark.parametrize(
    ("strategy", "to", "axes"),
    [pytest.param(*one, marks=[pytest.mark.thorough] * (one not in QUICK)) for one in SETS],
    ids=lambda v: v if isinstance(v, str) else "-".join(f"{x}" for x in v.values()),
)
def test_an_exported_set_trains_the_same(
    run_cells: RunCells, tmp_path: Path, strategy: str, to: str, axes: dict[str, Any]
) -> None:
    one = cell(strategy, **{"warmup_steps": 1, "timed_steps": 4, "parity_steps": 5, **axes})
    for package in ("accelerate", "deepspeed", "fairscale", "horovod", "torchft", "peft"):
        needs = (*make_strategy(one).requires, *make_workload(one.workload).requires)
        needed = package in (strategy, to, *needs)
        if (needed or "zero" in str(axes)) and find_spec(package) is None:
            pytest.skip(f"{package} is not installed: make setup")
    trial = run_cells(one).trials.iloc[0]
    assert trial["status"] == "ok", trial["reason"]
    files, note = export_files(one, to)
    assert not note
    folder = tmp_path / "set"
    write_files(files, folder)
    if to == "slurm":
        printed = in_batch(folder)
    elif (strategy, to, axes) not in STARTED_ANEW:
        printed = by_warm_ranks(folder, to)
    else:
        printed = run(["bash", str(folder / "run.sh")], folder)
    exported = losses(printed)
    assert len(exported) == one.total_steps
    assert max(loss_deviations(exported, list(trial["losses"]))) < 1e-6
    if trial["parity_verdict"] == "exact":
        assert max(loss_deviations(exported, list(trial["reference_losses"]))) < 1e-5
