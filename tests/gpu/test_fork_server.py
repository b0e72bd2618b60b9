"""Ranks are forked from a process that has imported their libraries, without initialising CUDA.

Stubs stand in for NVIDIA's driver libraries, and torch looks like a CUDA build that sees a GPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.cell.cell import Cell
from harness.host.environment import LEAVE_CUDA_ALONE, to_preload
from harness.host.gpu_state import GpuRecord, GpuUse, as_json
from harness.run.prepared import packages
from harness.worker.worker import _require_cuda
from tests.conftest import ROOT

NVML = r"""
#include <stdio.h>
#include <string.h>
#include <unistd.h>
/* The driver ties NVML's connection to the process that opened it. */
static int starts, owner;
enum { OK = 0, UNINITIALIZED = 1, UNKNOWN = 999 };
static int state(void) { return !starts ? UNINITIALIZED : owner == getpid() ? OK : UNKNOWN; }
int nvmlInit_v2(void) { if (!starts++) owner = getpid(); return OK; }
int nvmlInit(void) { return nvmlInit_v2(); }
int nvmlInitWithFlags(unsigned flags) { return nvmlInit_v2(); }
int nvmlShutdown(void) { if (!starts) return UNINITIALIZED; starts--; return OK; }
const char *nvmlErrorString(int code) { return "error"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return state(); }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    *handle = (void *)1; return state();
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    *handle = (void *)1;
    return strncmp(uuid, "GPU-", 4) ? 6 : state();
}
int nvmlDeviceGetUUID(void *handle, char *text, unsigned length) {
    snprintf(text, length, "GPU-stub"); return state();
}
int nvmlDeviceGetMigMode(void *handle, unsigned *now, unsigned *later) { return 3; }
int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *millijoules) {
    *millijoules = 5000; return state();
}
"""
"""Stub of NVML, which answers only the process that started it; in a forked child, every query
returns an error."""

CUDA = r"""
static int calls;
int cuInit(unsigned flags) { calls++; return 0; }
int cuInitCalls(void) { return calls; }
/* 3: CUDA_ERROR_NOT_INITIALIZED */
int cuDeviceGetCount(int *count) { *count = 1; return calls ? 0 : 3; }
"""
"""Stub of CUDA's driver library, which counts calls of cuInit by any library."""

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
"""Makes torch look like a CUDA build; records and stops calls that would initialise CUDA."""


def needs(package: str) -> pytest.MarkDecorator:
    lacks = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(lacks, reason=f"{package} is not installed: make setup")


def compiled(code: str, folder: Path, name: str) -> Path:
    """Compiles a shared library with this name; returns its path."""
    source, library = folder / f"{name}.c", folder / name
    source.write_text(code)
    flags = ["-shared", "-fPIC", f"-Wl,-soname,{name}"]
    subprocess.run(["cc", *flags, "-o", library, source], check=True)
    return library


def run_with(code: str, folder: Path, **environment: str) -> str:
    """Runs Python code in a new process that finds a folder's libraries first; returns its output.

    Raises AssertionError with stderr if it fails.
    """
    paths = [str(folder), os.environ.get("LD_LIBRARY_PATH", "")]
    variables = {"LD_LIBRARY_PATH": ":".join(filter(None, paths)), **environment}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


FORKED = """
import json, os, sys
from types import SimpleNamespace
from harness.host.process import LAUNCHER
from harness.worker.worker import PRELOAD

os.environ[LAUNCHER] = str(os.getppid())
os.environ[PRELOAD] = "asks_for_a_gpu"
import harness.worker.forkserver
assert sys.modules["asks_for_a_gpu"].ASKED

import torch
from harness.measure.resource_use import RankGpus

sys.stdout.flush()
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid="stub")
gpus = RankGpus([torch.device("cuda", 0)])
print(json.dumps([gpus.joules(), gpus.use().unanswered]), flush=True)
os._exit(0)
"""


def test_a_rank_asks_nvml_although_the_fork_server_had_started_it(tmp_path: Path) -> None:
    """If a library asks for a GPU at import, torch starts NVML and leaves it started."""
    compiled(NVML, tmp_path, "libnvidia-ml.so.1")
    asks = "import torch\nassert torch.cuda._raw_device_count_nvml() == 1\nASKED = True\n"
    (tmp_path / "asks_for_a_gpu.py").write_text(asks)
    printed = run_with(FORKED, tmp_path, PYTHONPATH=str(tmp_path))
    assert json.loads(printed) == [{"GPU-stub": [5.0, 0.0]}, ""]


def test_a_rank_without_answers_from_nvml_is_named() -> None:
    answered, silent = GpuUse(("GPU-a",), 1.0), GpuUse(unanswered="NVML did not answer")
    record = GpuRecord.read(None, None, as_json([answered, silent]))
    assert [words.partition(":")[0] for words in record.unanswered] == ["rank 1"]
    assert record.findings() == [], "missing answers do not make times doubtful"


IMPORTS = """
import contextlib, ctypes
import harness.worker.preload, harness.seam.registry, harness.worker.worker
from harness.host.environment import cuda_is_initialized

harness.worker.preload.import_packages({packages!r})
harness.seam.registry.strategies()
driver = ctypes.CDLL("libcuda.so.1")
assert (calls, driver.cuInitCalls(), cuda_is_initialized()) == ([], 0, False), calls
driver.cuInit(0)
assert cuda_is_initialized()
with contextlib.suppress(Exception):
    import bitsandbytes
assert "bitsandbytes" in calls[0], "an import that initialises CUDA is noticed"
"""


@needs("bitsandbytes")
def test_nothing_that_the_fork_server_imports_initialises_cuda(tmp_path: Path) -> None:
    """Imports everything that the fork server may import on a GPU host.

    The stub counts cuInit: torch.cuda.is_initialized() misses libraries that call the driver.
    """
    driver = compiled(CUDA, tmp_path, "libcuda.so.1")
    code = TRIPWIRE + IMPORTS.format(packages=sorted(LEAVE_CUDA_ALONE))
    run_with(code, tmp_path, LD_PRELOAD=str(driver))


PLANNING = """
import pytest
from tests.gpu.fake_nvml import h100_node, install

torch._C._cuda_getArchFlags = lambda: "sm_90"
install(pytest.MonkeyPatch(), h100_node())

from harness.cell.cell import Cell
from harness.host.environment import device_type
from harness.seam.peak_memory import peak_bytes
from harness.workloads.catalog import make_workload
from harness.workloads.counts import model_facts

assert device_type() == "cuda"
for name in ("llama-nano", "llama-nano+nf4+lora"):
    assert peak_bytes(Cell(strategy="ddp", workload=name, device="cuda")) > 0
assert model_facts(make_workload("llama-nano+nf4+lora"), 64).trained_bytes > 0
assert calls == [], calls
"""


@pytest.mark.thorough
def test_a_plan_whose_models_were_never_counted_leaves_cuda_alone(tmp_path: Path) -> None:
    """The process that plans a run lives as long as the run. A CUDA context in it would take memory
    on GPU 0 from every trial."""
    run_with(TRIPWIRE + PLANNING, tmp_path, PARALLELISM_BENCH_CACHE=str(tmp_path))


def test_a_package_that_nobody_has_checked_is_left_to_the_ranks() -> None:
    """Without GPUs everything is imported before the fork."""
    names = ["deepspeed", "a_plugins_library"]
    assert to_preload(names, with_gpus=True) == ["deepspeed"]
    assert to_preload(names, with_gpus=False) == names
    assert "peft" in packages([Cell(strategy="ddp", devices=2, workload="llama-nano+lora")])


def test_a_rank_names_the_import_that_took_cuda_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _require_cuda()
    greedy = SimpleNamespace(INITIALIZED_CUDA="package greedy")
    monkeypatch.setitem(sys.modules, "harness.worker.forkserver", greedy)
    with pytest.raises(RuntimeError, match="importing package greedy initialised CUDA"):
        _require_cuda()


SWITCHED = """
import gc
import deepspeed
import deepspeed.moe.layer, deepspeed.runtime.pipe.engine, deepspeed.runtime.zero.stage3
from deepspeed.accelerator import get_accelerator

before = type(get_accelerator()).__name__
from harness.strategies._deepspeed import settle

settle("cuda", 1)
gc.collect()
kept = [type(o).__name__ for o in gc.get_objects() if type(o).__name__.endswith("_Accelerator")]
from deepspeed.runtime.utils import PartitionedTensor

device = PartitionedTensor.from_meta.__func__.__defaults__[0]
print(before, *sorted(set(kept)), get_accelerator().communication_backend_name(), device)
"""


@needs("deepspeed")
def test_nothing_of_deepspeed_keeps_the_accelerator_of_its_import(tmp_path: Path) -> None:
    """The fork server may have imported DeepSpeed without seeing a GPU."""
    printed = run_with(SWITCHED, tmp_path, DS_ACCELERATOR="cpu")
    assert printed.splitlines()[-1] == "CPU_Accelerator CUDA_Accelerator nccl cuda"
