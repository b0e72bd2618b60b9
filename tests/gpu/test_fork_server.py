"""Ranks are forked from a process that has imported their libraries, without initialising CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.expand import expand
from bench.matrix import Host, read_matrix
from harness.run.prepared import packages

ROOT = Path(__file__).parents[2]

# Makes torch look like a CUDA build that sees a GPU; records and stops calls that would initialise
# CUDA.
TRIPWIRE = """
import os, sys, traceback
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # as the launcher sets it for the fork server
import torch, torch.cuda

calls = []

def initialize(*_, **__):
    frames = [f for f in traceback.extract_stack()[:-1] if "/torch/" not in f.filename]
    calls.append(" <- ".join(f"{f.filename}:{f.lineno} {f.name}" for f in reversed(frames[-3:])))
    raise RuntimeError("this would initialise CUDA")

torch.cuda._lazy_init = initialize
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.version.cuda = "13.0"
torch.backends.cuda.is_built = lambda: True
"""


def run_with_tripwire(code: str, **environment: str) -> list[str]:
    """Runs code in a new process; returns the calls that would have initialised CUDA."""
    end = "\nsys.stderr.write('TRIPWIRE ' + ' || '.join(calls) + '\\n')"
    command = [sys.executable, "-c", TRIPWIRE + code + end]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    line = next(
        (line for line in reversed(done.stderr.splitlines()) if line.startswith("TRIPWIRE")), None
    )
    assert line is not None, done.stderr
    return [call for call in line.removeprefix("TRIPWIRE ").split(" || ") if call]


def test_nothing_that_the_fork_server_imports_initialises_cuda() -> None:
    """Covers all imports for matrix full on an 8-GPU host, as in harness/worker/forkserver.py."""
    # this process only plans, and no rank is forked from it
    wanted = packages(expand(read_matrix("full"), Host("cuda", 8, 80 * 2**30)).cells)
    calls = run_with_tripwire(f"""
import harness.worker.preload, harness.seam.registry, harness.worker.worker

harness.worker.preload.import_packages({wanted!r})
harness.seam.registry.strategies()
""")
    assert calls == []


def test_a_plan_whose_models_were_never_counted_leaves_cuda_alone(tmp_path: Path) -> None:
    """The process that plans a run lives as long as the run. A CUDA context in it would take memory
    on GPU 0 from every trial."""
    planning = """
import os, sys
import pytest
from tests.gpu.fake_nvml import h100_node, install

torch._C._cuda_getArchFlags = lambda: "sm_90"
install(pytest.MonkeyPatch(), h100_node())

from bench.matrix import Host
from bench.expand import expand
from bench.matrix import read_matrix
from harness.host.environment import device_type
from harness.workloads.counts import model_facts
from harness.workloads.catalog import make_workload

assert device_type() == "cuda"
expand(read_matrix("smoke"), Host("cuda", 8, 80 * 2**30))
assert model_facts(make_workload("llama-nano+nf4+lora"), 64).trained_bytes > 0
"""
    assert run_with_tripwire(planning, PARALLELISM_BENCH_CACHE=str(tmp_path)) == []


def test_the_tripwire_catches_an_import_that_does() -> None:
    calls = run_with_tripwire(
        "import contextlib\nwith contextlib.suppress(Exception):\n    import bitsandbytes"
    )
    assert calls
    assert "bitsandbytes" in calls[0]


def test_without_gpus_everything_is_imported_before_the_fork() -> None:
    from harness.cell.cell import Cell
    from harness.run.prepared import packages

    assert "peft" in packages([Cell(strategy="ddp", devices=2, workload="llama-nano+lora")])


def test_a_package_that_nobody_has_checked_is_left_to_the_ranks() -> None:
    from harness.host.environment import to_preload

    assert to_preload(["deepspeed", "a_plugins_library"], with_gpus=True) == ["deepspeed"]
    assert to_preload(["deepspeed", "a_plugins_library"], with_gpus=False) == [
        "deepspeed",
        "a_plugins_library",
    ]


def test_a_rank_names_the_import_that_took_cuda_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.worker.worker import _require_cuda

    _require_cuda()
    monkeypatch.setitem(
        sys.modules, "harness.worker.forkserver", SimpleNamespace(INITIALIZED_CUDA="package greedy")
    )
    with pytest.raises(RuntimeError, match="importing package greedy initialised CUDA"):
        _require_cuda()
