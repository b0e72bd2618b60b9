"""What scripts/native.sh --plan would build Horovod for, on machines made of stub programs.

`make setup-cuda-check` really builds it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cell.cell import Cell
from harness.cell.errors import Unavailable
from harness.host.packages import Unbuilt
from harness.strategies import _horovod
from harness.strategies.horovod import Horovod
from harness.workloads import make_workload

ROOT = Path(__file__).parents[2]
TOOLS = ("bash", "dirname", "env", "g++", "gcc", "grep", "head", "realpath", "sed", "tr")
CUDA_13, CUDA_12, CPU_ONLY = "13.0 2.29.7 80,90,120", "12.9 2.27.3 80,90", "none none"
BY_TOOLKIT = (
    "Horovod with NCCL 2.29.7 for CUDA 13.0, with the toolkit {folder}/cuda (13.1), for GPUs"
    " 80,90,120"
)
BY_PACKAGES = (
    "Horovod with NCCL 2.29.7 for CUDA 13.0, with the compiler that the package index has, for GPUs"
    " 80,90,120"
)


def program(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


def plan(folder: Path, torch: str, driver: bool, toolkit: str, setting: str = "auto") -> str:
    """Returns the line that native.sh prints for this torch build, with or without a driver, and
    with an nvcc of this version or none ("")."""
    for name in TOOLS:
        (folder / "bin").mkdir(exist_ok=True)
        (folder / "bin" / name).symlink_to(shutil.which(name) or name)
    python = program(folder / "bin" / "python", f'[ "$1" = -c ] && echo "{torch}"')
    if driver:
        program(folder / "bin" / "nvidia-smi", "echo 580.95.05")
    # As in some distributions, nvcc on the PATH is a script that starts a compiler elsewhere.
    if toolkit:
        compiler = program(
            folder / "cuda" / "bin" / "nvcc",
            f'[ "$1" = --version ] && echo "release {toolkit}, V{toolkit}.88"\n'
            f'[ "$1" = --dryrun ] && echo "#\\$ TOP={folder}/cuda/bin/.." >&2',
        )
        program(folder / "bin" / "nvcc", f'exec {compiler} "$@"')
    unset = ("CUDA_HOME", "CC", "CXX")
    clean = {name: value for name, value in os.environ.items() if name not in unset} | {
        "PATH": str(folder / "bin"),
        "PARALLELISM_BENCH_CUDA": setting,
        "PARALLELISM_BENCH_CACHE": str(folder / "cache"),
        "NVIDIA_VERSION_FILE": str(folder / "none"),
        "MACHINE_CUDA": str(folder / "none"),
    }
    command = [str(ROOT / "scripts" / "native.sh"), str(python), "--plan"]
    return subprocess.run(
        command, env=clean, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.mark.parametrize(
    ("torch", "driver", "toolkit", "setting", "expected"),
    [
        (CUDA_13, True, "13.1", "auto", BY_TOOLKIT),
        (CUDA_13, True, "", "auto", BY_PACKAGES),
        (CUDA_13, True, "12.6", "auto", BY_PACKAGES),
        (CUDA_13, True, "13.1", "packages", BY_PACKAGES),
        (CUDA_13, False, "13.1", "auto", "there is no NVIDIA driver"),
        (CUDA_13, False, "13.1", "toolkit", BY_TOOLKIT),
        (CUDA_13, False, "", "packages", BY_PACKAGES),
        (CUDA_13, True, "12.6", "toolkit", "the machine's is 12.6 and torch has CUDA 13.0"),
        (CUDA_13, True, "13.1", "no", "PARALLELISM_BENCH_CUDA=no"),
        (CUDA_12, True, "", "auto", "CUDA 12.9 needs a toolkit of its major version"),
        (CPU_ONLY, True, "13.1", "auto", "this torch has no CUDA"),
        (CPU_ONLY, False, "13.1", "packages", "this torch has no CUDA"),
    ],
)
def test_what_horovod_is_built_for(
    tmp_path: Path, torch: str, driver: bool, toolkit: str, setting: str, expected: str
) -> None:
    """Builds for GPUs need a driver, or a setting, and a compiler of torch's major CUDA version."""
    found = plan(tmp_path, torch, driver, toolkit, setting)
    assert expected.format(folder=tmp_path) in found
    assert found.startswith("Horovod with NCCL" if "with" in expected else "Horovod for the CPU")


def test_a_torch_without_a_visible_gpu_still_says_what_it_has_code_for(tmp_path: Path) -> None:
    """Before torch 2.12, torch.cuda.get_arch_list() is empty without a visible GPU."""
    (tmp_path / "torch.py").write_text(
        "from types import SimpleNamespace as S\n"
        "version = S(cuda='13.0')\n"
        "distributed = S(is_nccl_available=lambda: True)\n"
        "cuda = S(nccl=S(version=lambda: (2, 28, 9)), get_arch_list=lambda: [])\n"
        "_C = S(_cuda_getArchFlags=lambda: 'sm_80 sm_90 sm_120')\n"
    )
    done = subprocess.run(
        [ROOT / "scripts" / "native.sh", sys.executable, "--plan"],
        env={
            **os.environ,
            "PYTHONPATH": str(tmp_path),
            "PARALLELISM_BENCH_CUDA": "packages",
            "PARALLELISM_BENCH_CACHE": str(tmp_path / "cache"),
        },
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip().endswith("for GPUs 80,90,120")


def test_a_failed_build_with_nccl_is_why_gpu_cells_are_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the NCCL build fails, set-up builds Horovod for the CPU, so CPU cells can run."""
    failure = Unbuilt("horovod", "0.28.1", "unsupported GNU version", "use gcc", "/cache/build.log")
    monkeypatch.setattr(_horovod, "unbuilt", lambda _: failure)
    monkeypatch.setattr(_horovod, "built", lambda part: part != b"NCCLAllreduce")
    on_gpu = Cell(strategy="horovod", workload="llama-nano", device="cuda")
    workload = make_workload(on_gpu.workload)
    with pytest.raises(Unavailable, match=r"CPU.*unsupported GNU version; use gcc"):
        Horovod().check(on_gpu, workload)
    Horovod().check(on_gpu.model_copy(update={"device": "cpu"}), workload)
    monkeypatch.setattr(_horovod, "built", lambda part: True)
    Horovod().check(on_gpu, workload)
    assert Horovod().stand_in(on_gpu) is None


@pytest.mark.parametrize(
    ("programs", "mpi"),
    [(("mpirun", "mpicxx"), "g++ -lmpi"), (("mpirun",), "none"), (("mpicxx",), "none")],
)
def test_horovod_is_built_with_mpi_if_all_of_it_is_there(
    tmp_path: Path, programs: tuple[str, ...], mpi: str
) -> None:
    """Distributions package `mpirun` and the compiler `mpicxx` separately."""
    for name in programs:
        program(tmp_path / name, "echo g++ -lmpi")
    script = (ROOT / "scripts" / "native.sh").read_text()
    lines = script[script.index("mpi=none") : script.index("has libaio.h")]
    done = subprocess.run(
        [shutil.which("bash") or "bash", "-euo", "pipefail", "-c", f'{lines}\necho "$mpi"'],
        env={"PATH": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == mpi
