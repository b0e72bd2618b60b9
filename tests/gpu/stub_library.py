"""Stubs of NVIDIA's driver libraries, in a few lines of C."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

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
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
