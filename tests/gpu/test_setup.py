"""Findings 2, 18 and 19: set-up goes on without what it cannot build, says what it is on, and
builds for the processor it is told."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

from harness.host import unbuilt
from harness.spec.cell import Cell
from harness.spec.errors import Unavailable
from harness.strategies import _deepspeed
from harness.strategy.registry import make_strategy, validate
from harness.workloads import make_workload
from tests.conftest import ROOT

COMPILER = """\
Processing ./.
  error: subprocess-exited-with-error
  [30 lines of output]
      -- The CXX compiler identification is GNU 14.2.0
      /tmp/tmp.n/horovod/common/common.h:343:18: error: 'logic_error' is not a member of 'std'
      gmake: *** [Makefile:136: all] Error 2
      subprocess.CalledProcessError: Command '['cmake', '--build']' returned non-zero exit status 2.
  ERROR: Failed building wheel for horovod
"""
CMAKE = """\
      CMake Error at CMakeLists.txt:139 (find_package):
        Could not find a package configuration file provided by "MPI"
      subprocess.CalledProcessError: Command '['cmake', '/tmp/tmp.n']' returned exit status 1.
"""
INDEX = """\
WARNING: Retrying (Retry(total=4)) after connection broken
ERROR: Could not find a version that satisfies the requirement horovod==0.28.1 (from versions: none)
ERROR: No matching distribution found for horovod==0.28.1
"""


@pytest.mark.parametrize(
    ("log", "error"),
    [
        (COMPILER, "horovod/common/common.h:343:18: error: 'logic_error' is not a member of 'std'"),
        (
            CMAKE,
            (
                "CMake Error at CMakeLists.txt:139 (find_package): Could not find a package"
                ' configuration file provided by "MPI"'
            ),
        ),
        (
            INDEX,
            (
                "ERROR: Could not find a version that satisfies the requirement horovod==0.28.1"
                " (from versions: none)"
            ),
        ),
        (
            "<command-line>: fatal error: mpi.h: No such file\nValueError: 2",
            "<command-line>: fatal error: mpi.h: No such file",
        ),
        ("Killed\n", "Killed"),
        ("", "its log is empty"),
    ],
    ids=["compiler", "cmake", "index", "header", "last line", "nothing"],
)
def test_the_first_error_of_a_log(log: str, error: str) -> None:
    assert unbuilt.first_error(log, "/tmp/tmp.n") == error


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """Another virtual environment, with the packages of this one: what set-up keeps in it is not
    kept in this one."""
    target = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(target)], check=True)
    packages = (
        target / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    )
    (packages / "here.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return target


def test_what_could_not_be_built_is_unavailable_with_the_first_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    log = tmp_path / "build.log"
    log.write_text(COMPILER)
    unbuilt.keep("horovod_of_another_name", "0.28.1", log, "/tmp/tmp.n", "mend that")
    cell = Cell(strategy="ddp", devices=2, workload="llama-nano")
    monkeypatch.setattr(type(make_strategy(cell)), "requires", ("horovod_of_another_name",))
    with pytest.raises(
        Unavailable,
        match=(
            r"not installed: set-up could not build .*common.h:343.*mend that, then `make"
            r" setup`.*build\.log"
        ),
    ):
        validate(cell, make_workload("llama-nano"))


def test_deepspeed_without_compiled_parts_lacks_what_needs_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(_deepspeed, "compiled_parts", set)
    (tmp_path / "build.log").write_text(
        "csrc/adam/cpu_adam.cpp:7:10: fatal error: omp.h: No such file or directory\n"
    )
    unbuilt.keep("deepspeed", "0.19.8", tmp_path / "build.log", "", "mend that")
    axes = {"strategy": "deepspeed", "devices": 2, "workload": "llama-micro", "optimizer": "adamw"}
    validate(Cell(**axes, options={"stage": 2}), make_workload("llama-micro"))
    with pytest.raises(Unavailable, match=r"cpu_adam is not compiled: .*omp\.h: No such file"):
        validate(
            Cell(**axes, options={"stage": 2, "offload_optimizer": "cpu"}),
            make_workload("llama-micro"),
        )


def native(environment: Path, cache: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """scripts/native.sh with no package index but a folder."""
    given = (
        os.environ
        | {
            "PARALLELISM_BENCH_CACHE": str(cache),
            "PIP_NO_INDEX": "1",
            "PIP_CONFIG_FILE": "/dev/null",
        }
        | variables
    )
    command = ["bash", "scripts/native.sh", str(environment / "bin" / "python")]
    return subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, check=False)


@pytest.mark.skipif(
    shutil.which("g++") is None or platform.machine() != "x86_64",
    reason="names a processor that only an x86-64 g++ knows",
)
def test_set_up_goes_on_without_what_it_cannot_have(environment: Path, tmp_path: Path) -> None:
    release = tmp_path / "horovod-0.28.1"
    release.mkdir()
    (release / "setup.py").write_text(
        "from setuptools import setup; setup(name='horovod', version='0.28.1')"
    )
    with tarfile.open(tmp_path / "horovod-0.28.1.tar.gz", "w:gz") as archive:
        archive.add(release, arcname=release.name)
    done = native(
        environment,
        tmp_path / "cache",
        PIP_FIND_LINKS=str(tmp_path),
        PARALLELISM_BENCH_MARCH="x86-64-v2",
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    kept = environment / "share" / "parallelism-bench" / "unbuilt"
    assert "has another checksum than 92a43f5a" in (kept / "horovod.json").read_text()
    assert (
        "Could not find a version that satisfies the requirement deepspeed==0.19.8"
        in (kept / "deepspeed.json").read_text()
    )
    folders = [
        folder.name for folder in (tmp_path / "cache" / "wheels" / "horovod-0.28.1").iterdir()
    ]
    assert ["x86-64-v2" in name and f"py3{sys.version_info[1]}" in name for name in folders] == [
        True
    ]


def set_up(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """scripts/setup.sh in a copy of what it reads, stopped by an index that has nothing where it
    would install torch."""
    for name in ("scripts", "pyproject.toml", "constraints.txt"):
        if not (folder / name).exists():
            subprocess.run(["cp", "-r", str(ROOT / name), str(folder / name)], check=True)
    stubs = folder / "stubs"
    stubs.mkdir(exist_ok=True)
    (stubs / "apt-get").write_text("#!/bin/sh\nexit 1\n")
    (stubs / "apt-get").chmod(0o755)
    given = os.environ | {
        "PATH": f"{stubs}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "PIP_NO_INDEX": "1",
        "PIP_CONFIG_FILE": "/dev/null",
    }
    given = {name: value for name, value in given.items() if name != "PIP_FIND_LINKS"} | variables
    return subprocess.run(
        ["bash", "scripts/setup.sh", *words],
        cwd=folder,
        env=given,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("interpreter", ["another", "gone"])
def test_an_environment_of_another_python_is_made_anew(tmp_path: Path, interpreter: str) -> None:
    old = tmp_path / ".venv"
    (old / "bin").mkdir(parents=True)
    (old / "pyvenv.cfg").write_text("home = /opt/python3.9/bin\n")
    (old / "of-the-old-one").touch()
    python = old / "bin" / "python"
    if interpreter == "another":
        python.write_text("#!/bin/sh\necho 3.9.1 /opt/python3.9\n")
        python.chmod(0o755)
    else:
        python.symlink_to(tmp_path / "nowhere")
    done = set_up(tmp_path)
    assert "making .venv anew" in done.stdout, done.stderr
    assert not (old / "of-the-old-one").exists()
    version = subprocess.run(
        [python, "-c", "import sys; print(sys.version)"], capture_output=True, text=True, check=True
    ).stdout
    assert version.strip() == sys.version
    assert done.returncode == 1  # the index has nothing
    assert "1/4 installing torch" in done.stdout


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "letters").touch()
    done = set_up(tmp_path)
    assert (done.returncode, done.stderr) == (
        1,
        "setup: .venv is no virtual environment; move it away\n",
    )
    assert (tmp_path / ".venv" / "letters").exists()


def test_a_processor_that_the_compiler_does_not_know(tmp_path: Path) -> None:
    done = set_up(tmp_path, PARALLELISM_BENCH_MARCH="x86-64-v33")
    assert done.returncode == 2
    assert "PARALLELISM_BENCH_MARCH=x86-64-v33 is no processor that" in done.stderr
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize(
    ("driver", "cuda", "fits"),
    [("535.104.05", "13.0", False), ("580.65.06", "13.0", True), ("535.104.05", "12.6", True)],
)
def test_a_driver_too_old_for_torch_is_said(
    tmp_path: Path, driver: str, cuda: str, fits: bool
) -> None:
    for name, printed in {
        "nvidia-smi": driver,
        "nvcc": "Cuda compilation tools, release 13.0, V13.0.88",
        "python": f"2.13.0+cu {cuda}",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{printed}'\n")
        (tmp_path / name).chmod(0o755)
    given = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PARALLELISM_BENCH_MARCH": "x86-64-v3",
    }
    command = ["bash", "scripts/machine.sh", str(tmp_path / "python")]
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, check=True)
    assert (
        f"NVIDIA driver {driver}, CUDA toolkit release 13.0 ({tmp_path}/nvcc), torch 2.13.0+cu with"
        f" CUDA {cuda}" in done.stdout
    )
    assert "for the processor x86-64-v3" in done.stdout
    assert ("too old for torch's CUDA 13.0, which needs 580 or newer" in done.stdout) == (not fits)
