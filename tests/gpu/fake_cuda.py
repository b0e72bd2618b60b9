"""`python -m tests.gpu.fake_cuda [PYTEST ARGUMENTS]` runs tests on fake CUDA tensors without a GPU.

It needs torch's CUDA build, a C compiler and CUDA's headers. Those come with torch's packages,
nvidia-cuda-crt or a toolkit in $CUDA_HOME. tests/gpu/cuda_runtime.c stands in for the runtime.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
TESTS = ["test_fake_steps.py", "test_initial_weights.py"]


def include_folders() -> list[Path]:
    """Returns the folders of CUDA's headers; exits with a message if a header is missing."""
    home = os.environ.get("CUDA_HOME")
    packages = [Path(entry or ".") for entry in sys.path]
    folders = [
        *([Path(home) / "include"] if home else []),
        *(folder for package in packages for folder in package.glob("nvidia/cu*/include")),
        *(package / "triton/backends/nvidia/include" for package in packages),
    ]
    for header in ("cuda_runtime_api.h", "crt/host_defines.h"):
        if not any((folder / header).is_file() for folder in folders):
            sys.exit(f"CUDA's {header} is missing: pip install nvidia-cuda-runtime nvidia-cuda-crt")
    return [folder for folder in folders if folder.is_dir()]


def build(folder: Path) -> Path:
    """Compiles the stand-in, named like the driver's library, which torch opens later."""
    library = folder / "libcuda.so.1"
    headers = [f"-I{folder}" for folder in include_folders()]
    flags = ["-O1", "-shared", "-fPIC", *headers, f"-Wl,-soname,{library.name}"]
    subprocess.run(["cc", *flags, "-o", library, HERE / "cuda_runtime.c"], check=True)
    return library


def main() -> int:
    words = sys.argv[1:] or ["-q"]
    if not any(Path(word.partition("::")[0]).exists() for word in words):
        words = [*words, *(str(HERE / name) for name in TESTS)]
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))
        variables = {"LD_PRELOAD": str(library), "BENCH_FAKE_DEVICE": "cuda"}
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words],
            cwd=HERE.parents[1],
            env={**os.environ, **variables},
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
