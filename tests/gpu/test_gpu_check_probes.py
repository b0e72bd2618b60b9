"""The GPU check's probes, each in its own process, with the CPU as a stand-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DRIVER = """
static int started = 0;
int cuInit(unsigned flags) { started = 1; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return started ? 0 : 3; }
"""
"""Stub of CUDA's driver library, which answers only after cuInit."""


def found(name: str) -> dict[str, object]:
    command = [sys.executable, "-m", "bench.gpu_check.probes", name, "cpu"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    finding: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return finding


@pytest.mark.parametrize("name", ["collectives", "fork", "host", "numerics", "profiler", "speed"])
def test_a_probe_answers_for_the_cpu(name: str) -> None:
    finding = found(name)
    assert finding["verdict"] == "confirmed", finding
    assert finding["facts"]


@pytest.mark.parametrize("name", ["memory", "nvml"])
def test_a_probe_that_needs_a_gpu_says_so(name: str) -> None:
    finding = found(name)
    assert (finding["verdict"], finding["facts"]) == ("not checked", None)
    assert finding["reason"]


def test_weights_and_float8_have_an_answer() -> None:
    """Verdicts depend on this machine's libraries and processor."""
    assert found("weights")["facts"]
    assert found("float8")["verdict"] in ("confirmed", "not checked")


def test_a_library_that_starts_cuda_by_itself_is_detected(tmp_path: Path) -> None:
    """The driver is asked: torch.cuda.is_initialized() only knows about torch's calls."""
    source, library = tmp_path / "driver.c", tmp_path / "libcuda.so.1"
    source.write_text(DRIVER)
    flags = ["-shared", "-fPIC", f"-Wl,-soname,{library.name}"]
    subprocess.run(["cc", *flags, "-o", library, source], check=True)
    (tmp_path / "eager_library.py").write_text(
        f"import ctypes\nctypes.CDLL({str(library)!r}).cuInit(0)\n"
    )
    (tmp_path / "lazy_library.py").write_text(f"import ctypes\nctypes.CDLL({str(library)!r})\n")
    code = (
        "import json; from bench.gpu_check.probes.processes import imports_that_initialise;"
        "print(json.dumps(imports_that_initialise("
        "['eager_library', 'json', 'lazy_library', 'no_such_library'])))"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "eager_library": True,
        "json": False,
        "lazy_library": False,
        "no_such_library": None,
    }
