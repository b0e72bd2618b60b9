"""Set-up describes the machine, builds for the requested processor, and survives failed builds."""

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

from harness.cell.cell import Cell
from harness.cell.errors import Unavailable
from harness.host import packages
from harness.seam.registry import make_strategy, validate
from harness.strategies import _deepspeed
from harness.workloads import make_workload
from tests.conftest import ROOT

COMPILER = """\
  error: subprocess-exited-with-error
      /tmp/tmp.n/horovod/common/common.h:343:18: error: 'logic_error' is not a member of 'std'
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
HEADER = "<command-line>: fatal error: mpi.h: No such file"


@pytest.mark.parametrize(
    ("log", "error"),
    [
        (COMPILER, "horovod/common/common.h:343:18: error: 'logic_error' is not a member of 'std'"),
        (CMAKE, " ".join(line.strip() for line in CMAKE.splitlines()[:2])),
        (INDEX, INDEX.splitlines()[1]),
        (f"{HEADER}\nValueError: 2", HEADER),
        ("Killed\n", "Killed"),
        ("", "its log is empty"),
    ],
    ids=["compiler", "cmake", "index", "header", "last line", "nothing"],
)
def test_the_first_error_of_a_log_is_found(log: str, error: str) -> None:
    assert packages.first_error(log, "/tmp/tmp.n") == error


def test_a_library_that_was_not_built_is_unavailable_with_the_first_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    log = tmp_path / "build.log"
    log.write_text(COMPILER)
    packages.keep("horovod_of_another_name", "0.28.1", log, "/tmp/tmp.n", "fix that")
    cell = Cell(strategy="ddp", devices=2, workload="llama-nano")
    monkeypatch.setattr(type(make_strategy(cell)), "requires", ("horovod_of_another_name",))
    words = r"could not build .*common.h:343.*fix that, then run `make setup`.*build\.log"
    with pytest.raises(Unavailable, match=words):
        validate(cell, make_workload("llama-nano"))


def test_deepspeed_without_compiled_parts_lacks_what_needs_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(_deepspeed, "compiled_parts", set)
    (tmp_path / "build.log").write_text(
        "csrc/adam/cpu_adam.cpp:7:10: fatal error: omp.h: No such file or directory\n"
    )
    packages.keep("deepspeed", "0.19.8", tmp_path / "build.log", "", "fix that")
    axes = {"strategy": "deepspeed", "devices": 2, "workload": "llama-micro", "optimizer": "adamw"}
    workload = make_workload("llama-micro")
    validate(Cell(**axes, options={"stage": 2}), workload)
    with pytest.raises(Unavailable, match=r"cpu_adam is not compiled: .*omp\.h: No such file"):
        validate(Cell(**axes, options={"stage": 2, "offload_optimizer": "cpu"}), workload)


@pytest.mark.skipif(
    shutil.which("g++") is None or platform.machine() != "x86_64",
    reason="needs g++ for x86-64, because the test builds for such a processor",
)
def test_set_up_continues_without_unavailable_libraries(tmp_path: Path) -> None:
    """Another virtual environment has this one's packages, so that set-up writes nothing here."""
    environment, release = tmp_path / "venv", tmp_path / "horovod-0.28.1"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    (site_packages,) = environment.glob("lib/*/site-packages")
    (site_packages / "here.pth").write_text(sysconfig.get_path("purelib") + "\n")
    release.mkdir()
    (release / "setup.py").write_text(
        "from setuptools import setup; setup(name='horovod', version='0.28.1')"
    )
    with tarfile.open(tmp_path / "horovod-0.28.1.tar.gz", "w:gz") as archive:
        archive.add(release, arcname=release.name)
    given = {
        "PARALLELISM_BENCH_CACHE": str(tmp_path / "cache"),
        "PARALLELISM_BENCH_MARCH": "x86-64-v2",
        "PIP_FIND_LINKS": str(tmp_path),
        "PIP_NO_INDEX": "1",
        "PIP_CONFIG_FILE": "/dev/null",
    }
    words = ["bash", "scripts/native.sh", str(environment / "bin" / "python")]
    done = subprocess.run(words, cwd=ROOT, env=os.environ | given, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    unbuilt = environment / "share" / "parallelism-bench" / "unbuilt"
    assert "checksum is not 92a43f5a" in (unbuilt / "horovod.json").read_text()
    assert "requirement deepspeed==0.19.8" in (unbuilt / "deepspeed.json").read_text()
    (folder,) = (tmp_path / "cache" / "wheels" / "horovod-0.28.1").iterdir()
    assert "x86-64-v2" in folder.name
    assert f"py3{sys.version_info[1]}" in folder.name


def command(file: Path, script: str) -> None:
    """Writes an executable shell script."""
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


def set_up(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs scripts/setup.sh in a copy of its files; an empty package index stops it at torch."""
    for name in ("scripts", "pyproject.toml", "constraints.txt"):
        if not (folder / name).exists():
            subprocess.run(["cp", "-r", str(ROOT / name), str(folder / name)], check=True)
    stubs = folder / "stubs"
    if not (stubs / "apt-get").exists():
        command(stubs / "apt-get", "exit 1")
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


@pytest.mark.parametrize(
    "interpreter", [pytest.param("another", marks=pytest.mark.thorough), "gone"]
)
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
    assert done.returncode == 1  # the index is empty
    assert "1/4 installing torch" in done.stdout


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "letters").touch()
    done = set_up(tmp_path)
    assert (done.returncode, done.stderr) == (
        1,
        "setup: .venv is not a virtual environment; move it away\n",
    )
    assert (tmp_path / ".venv" / "letters").exists()


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        (["--neeed"], {}),
        ([], {"PARALLELISM_BENCH_MARCH": "x86-64-v33"}),
        ([], {"PARALLELISM_BENCH_TORCH_CUDA": "11"}),
    ],
)
def test_what_set_up_does_not_know_is_named(
    tmp_path: Path, words: list[str], variables: dict[str, str]
) -> None:
    done = set_up(tmp_path, *words, **variables)
    assert done.returncode == 2
    assert all(text in done.stderr for text in (*words, *variables, *variables.values()))
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize(
    ("driver", "cuda", "fits"),
    [("535.104.05", "13.0", False), ("580.65.06", "13.0", True), ("535.104.05", "12.6", True)],
)
def test_a_driver_too_old_for_torch_is_reported(
    tmp_path: Path, driver: str, cuda: str, fits: bool
) -> None:
    for name, printed in {
        "nvidia-smi": driver,
        "nvcc": "Cuda compilation tools, release 13.0, V13.0.88",
        "python": f"2.13.0+cu {cuda}",
    }.items():
        command(tmp_path / name, f"echo '{printed}'")
    given = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PARALLELISM_BENCH_MARCH": "x86-64-v3",
    }
    words = ["bash", "scripts/machine.sh", str(tmp_path / "python")]
    done = subprocess.run(words, cwd=ROOT, env=given, capture_output=True, text=True, check=True)
    assert (
        f"NVIDIA driver {driver}, CUDA toolkit release 13.0 ({tmp_path}/nvcc), torch 2.13.0+cu with"
        f" CUDA {cuda}" in done.stdout
    )
    assert "for the processor x86-64-v3" in done.stdout
    assert ("too old for torch's CUDA 13.0, which needs 580 or newer" in done.stdout) == (not fits)
    assert ("PARALLELISM_BENCH_TORCH_CUDA=12 make setup" in done.stdout) == (not fits)


@pytest.mark.parametrize(
    ("driver", "asked", "major"),
    [
        ("580.95.05", None, "13"),
        ("550.54.15", None, "12"),
        ("470.256.02", None, "13"),
        ("550.54.15", "13", "13"),
    ],
)
def test_torch_is_built_for_a_cuda_that_the_driver_runs(
    tmp_path: Path, driver: str, asked: str | None, major: str
) -> None:
    """CUDA 12 needs driver 525, CUDA 13 driver 580; there is no torch build for older drivers. In
    an environment for another CUDA, pip would keep its torch, so it is made anew."""
    made = tmp_path / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(made)], check=True)
    (made / ".torch-major").write_text("13\n")
    (made / "of-the-old-one").touch()
    command(tmp_path / "stubs" / "nvidia-smi", f"echo {driver}")
    variables = {"NVIDIA_VERSION_FILE": str(tmp_path / "none")}
    chosen = {"PARALLELISM_BENCH_TORCH_CUDA": asked} if asked else {}
    done = set_up(tmp_path, **variables, **chosen)
    assert "1/4 installing torch" in done.stdout, done.stderr
    assert (made / "of-the-old-one").exists() == (major == "13")
    pinned = made / ".constraints.txt"
    assert pinned.exists() == (major == "12")
    if major == "12":
        lines = pinned.read_text().splitlines()
        assert [line for line in lines if line.startswith("torch==")] == ["torch==2.10.0"]
        again = set_up(tmp_path, **variables).stdout
        assert "torch 2.10" in again, "the choice is remembered"
        assert "anew" not in again


def root_without(folder: Path, *absent: str) -> Path:
    """Makes a PATH folder of this machine's commands, without `absent`; `id` reports root.

    `apt-get install` logs its arguments, and the package archive lacks chromium.
    """
    stubs = folder / "stubs"
    stubs.mkdir()
    for file in Path("/usr/bin").iterdir():
        if file.name not in (*absent, "apt-get", "apt-cache", "id"):
            (stubs / file.name).symlink_to(file)
    command(stubs / "id", "echo 0")
    command(
        stubs / "apt-get", f'[ "$1" != install ] || echo "$@" >>{folder}/log; exit ${{FAILS:-0}}'
    )
    command(
        stubs / "apt-cache",
        'case $2 in chromium) echo "  Candidate: (none)" ;; *) echo "  Candidate: 1.0" ;; esac',
    )
    return stubs


def installed(folder: Path) -> list[set[str]]:
    """Returns the packages of each call of apt-get install."""
    calls = (folder / "log").read_text().splitlines()
    return [{word for word in call.split()[1:] if not word.startswith("-")} for call in calls]


@pytest.mark.parametrize("words", [(), ("--need", "--tests")])
def test_root_gets_packages_for_runs_and_on_request_for_tests(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    """One call installs all packages that the archive has; Ubuntu's has no chromium."""
    stubs = root_without(tmp_path, "mpirun", "chromium", "shellcheck")
    done = set_up(tmp_path, *words, PATH=str(stubs), PARALLELISM_BENCH_MARCH="ends-it-here")
    (packages,) = installed(tmp_path)
    assert "openmpi-bin" in packages
    assert ("shellcheck" in packages) == bool(words)
    assert "chromium" not in packages
    assert ("chromium" in done.stderr) == bool(words)


def test_a_package_that_fails_does_not_sink_the_others(tmp_path: Path) -> None:
    stubs = root_without(tmp_path, "mpirun", "mpicxx")
    set_up(tmp_path, PATH=str(stubs), FAILS="1", PARALLELISM_BENCH_MARCH="ends-it-here")
    together, *alone = installed(tmp_path)
    assert {"openmpi-bin", "libopenmpi-dev"} <= together
    assert len(alone) == len(together)
    assert set().union(*alone) == together
