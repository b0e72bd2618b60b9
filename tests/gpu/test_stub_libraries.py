"""Ranks forked from a process whose libraries may have started NVML or initialised CUDA."""

from __future__ import annotations

import json
from pathlib import Path

from harness.host.environment import LEAVE_CUDA_ALONE
from harness.host.gpu_state import GpuRecord, GpuUse, as_json
from tests.gpu.stub_library import CUDA, NVML, compiled, run_with

FORK_SERVER = """
import os, sys
from harness.host.process import LAUNCHER
from harness.worker.worker import PRELOAD

os.environ[LAUNCHER] = str(os.getppid())
os.environ[PRELOAD] = "asks_for_a_gpu"
import harness.worker.forkserver
"""

RANK = """
import json
from types import SimpleNamespace
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
    seen = "assert sys.modules['asks_for_a_gpu'].ASKED\n"
    printed = run_with(FORK_SERVER + seen + RANK, tmp_path, PYTHONPATH=str(tmp_path))
    assert json.loads(printed) == [{"GPU-stub": [5.0, 0.0]}, ""]


def test_nvml_is_as_silent_in_a_child_of_the_stub_as_with_the_driver(tmp_path: Path) -> None:
    """The previous test would see this answer if the fork server left NVML started."""
    compiled(NVML, tmp_path, "libnvidia-ml.so.1")
    started = "import os, sys, torch\nassert torch.cuda._raw_device_count_nvml() == 1\n"
    assert json.loads(run_with(started + RANK, tmp_path)) == [None, "NVML did not answer"]


def test_a_rank_without_answers_from_nvml_is_named() -> None:
    answered, silent = GpuUse(("GPU-a",), 1.0), GpuUse(unanswered="NVML did not answer")
    record = GpuRecord.read(None, None, as_json([answered, silent]))
    assert [words.partition(":")[0] for words in record.unanswered] == ["rank 1"]
    assert record.findings() == [], "missing answers do not make times doubtful"


IMPORTS = """
import ctypes, os
import harness.worker.preload, harness.seam.registry, harness.worker.worker
from harness.host.environment import cuda_is_initialized

harness.worker.preload.import_packages({packages!r})
harness.seam.registry.strategies()
driver = ctypes.CDLL("libcuda.so.1")
print(driver.cuInitCalls(), cuda_is_initialized())
driver.cuInit(0)
print(driver.cuInitCalls(), cuda_is_initialized())
"""


def test_no_import_of_the_fork_server_initialises_the_driver(tmp_path: Path) -> None:
    """Imports everything that the fork server may import on a GPU host.

    The stub counts cuInit: torch.cuda.is_initialized() misses libraries that call the driver.
    """
    compiled(CUDA, tmp_path, "libcuda.so.1")
    printed = run_with(
        IMPORTS.format(packages=sorted(LEAVE_CUDA_ALONE)),
        tmp_path,
        LD_PRELOAD=str(tmp_path / "libcuda.so.1"),
        PYTORCH_NVML_BASED_CUDA_CHECK="1",
    )
    assert printed.splitlines()[-2:] == ["0 False", "1 True"], printed  # DeepSpeed prints too
