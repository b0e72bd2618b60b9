"""Risks that only a GPU can settle, tested as far as possible on a machine without one.

| risk | shown by |
|---|---|
| NVML in a rank whose fork server had started it | test_stub_libraries.py |
| a library initialises CUDA when it is imported | test_stub_libraries.py, test_fork_server.py |
| rounding of a GPU's kernels against limits found on CPUs | test_references.py, test_parity.py |
| float8 products that come back in bf16 | test_float8.py, test_plans.py |
| copies of states in host memory under a cgroup's limit | test_host_memory.py |
| DeepSpeed's accelerator, switched after its import | here |
| fairscale's FullyShardedDataParallel; FSDP1 on one rank with offload | here |
| bitsandbytes' kernels for torch's version of CUDA | here: their files, and what these link to |
| CUPTI refused, so that the profiler sees no kernel | here |
| a cold start taken for a hang | test_hang.py |
| DataParallel on one GPU is `single` | here |

Three things are not tested. The size of cuBLAS's workspace needs a GPU. As torch allocates it, it
counts against a memory budget like a tensor; too small a budget ends in torch's out-of-memory error
(test_failure_texts.py). The architectures of bitsandbytes' kernels are in compressed sections that
only CUDA's tools read. FSDP1's offload on several ranks fails if they compute on a CPU: torch
mistakes offloaded gradients for those on the device and adds to them.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.cell.cell import Cell
from harness.cell.training import EXACT
from harness.seam.registry import make_strategy
from harness.worker.rank_profile import require_device_events
from tests.gpu.stub_library import ROOT, run_with


def needs(package: str) -> pytest.MarkDecorator:
    lacks = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(lacks, reason=f"{package} is not installed: make setup")


def deviations(ranks: int, folder: Path, strategy: str, *options: dict[str, Any]) -> list[float]:
    """Runs tests/gpu/stubbed_ranks.py; returns each option's deviation from plain training."""
    words = [folder, strategy, *map(json.dumps, options)]
    commands = [
        [sys.executable, "-W", "ignore", "-m", "tests.gpu.stubbed_ranks", rank, ranks, *words]
        for rank in range(ranks)
    ]
    started = [
        subprocess.Popen(
            [str(word) for word in command],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command in commands
    ]
    try:
        outputs = [process.communicate(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0] * ranks, [err for _, err in outputs]
    found: list[float] = json.loads(outputs[0][0].splitlines()[-1])
    return found


@needs("fairscale")
def test_fairscales_fsdp_trains_the_same_on_idle_streams(tmp_path: Path) -> None:
    options: list[dict[str, Any]] = [
        {},
        {"reshard_after_forward": False},
        {"cpu_offload": True},
        {"no_sync": False},
    ]
    found = deviations(2, tmp_path, "fairscale_fsdp", *options)
    assert max(found) < EXACT.update / 10


def test_fsdp1_on_one_rank_trains_the_same_with_offload(tmp_path: Path) -> None:
    """On one rank torch uses NO_SHARD, which has its own path for offloaded gradients."""
    flat = {"cpu_offload": True, "use_orig_params": False}
    found = deviations(1, tmp_path, "fsdp1", {"cpu_offload": True}, flat)
    assert max(found) < EXACT.update / 10


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


@needs("bitsandbytes")
@pytest.mark.parametrize("version", [(12, 6), (12, 8), (13, 0), (13, 2)])
def test_bitsandbytes_has_kernels_for_torchs_cuda(version: tuple[int, int]) -> None:
    """Builds of torch 2.10 to 2.13 use these versions of CUDA. The kernels' library must link to
    the runtime of the same major version, which torch's packages bring."""
    from bitsandbytes.cextension import get_cuda_bnb_library_path
    from bitsandbytes.cuda_specs import CUDASpecs

    text = "".join(map(str, version))
    library = get_cuda_bnb_library_path(CUDASpecs((9, 0), text, version))
    assert library.name == f"libbitsandbytes_cuda{text}.so"
    content = library.read_bytes()
    assert f"libcudart.so.{version[0]}\0".encode() in content
    assert b"quantize" in content


def event(device: str) -> Any:
    return SimpleNamespace(device_type=lambda: SimpleNamespace(name=device))


def test_a_profile_without_device_events_is_refused() -> None:
    require_device_events([event("CPU"), event("CUDA")])
    for seen in ([], [event("CPU"), event("CPU")]):
        with pytest.raises(RuntimeError, match="device"):
            require_device_events(seen)


def stand_ins() -> Iterator[tuple[str, int, bool]]:
    for device, devices in (("cuda", 1), ("cuda", 2), ("cpu", 1), ("cpu", 2)):
        cell = Cell(strategy="data_parallel", device=device, devices=devices)
        yield device, devices, make_strategy(cell).stand_in(cell) is not None


def test_data_parallel_on_one_gpu_is_labelled() -> None:
    assert {(device, devices) for device, devices, labelled in stand_ins() if not labelled} == {
        ("cuda", 2)
    }
