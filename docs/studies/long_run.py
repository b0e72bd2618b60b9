"""Watches the process of one run with many short trials for leaks.

`python -m docs.studies.long_run [--trials 2000]` exits with 1 if, from the run's first tenth to its
last, memory grows by more than 20 MB, or open files, threads, children, shared-memory files or
temporary files increase.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

MOST_BYTES = 20_000_000
SHARED_MEMORY = Path("/dev/shm")
MATRIX = """
trials: {trials}
timed_seconds: 0
defaults: {{workload: llama-nano, sequence_length: 8, batch: 1, devices: 1, warmup_steps: 1,
  timed_steps: 1}}
cells: [{{strategy: single}}]
"""
Sample = dict[str, int]


def sample(run: psutil.Process, temporary: Path) -> Sample:
    """Raises psutil.NoSuchProcess if the run or one of its processes has ended.

    `fork_server_bytes`: resident memory of the process that ranks are forked from.
    """
    below = run.children(recursive=True)
    servers = [
        child
        for child in below
        if child.ppid() == run.pid and any("forkserver" in word for word in child.cmdline())
    ]
    return {
        "memory_bytes": run.memory_info().rss,
        "fork_server_bytes": sum(server.memory_info().rss for server in servers),
        "open_files": run.num_fds(),
        "threads": run.num_threads(),
        "children": len(below),
        "temporary_files": sum(len(files) for _, _, files in os.walk(temporary)),
    }


def watched(trials: int, folder: Path) -> list[Sample]:
    temporary, results = folder / "tmp", folder / "results"
    temporary.mkdir()
    matrix = folder / "long.yaml"
    matrix.write_text(MATRIX.format(trials=trials))
    arguments = ["run", "--matrix", str(matrix), "--results", str(results), "--no-report"]
    process = subprocess.Popen(
        [sys.executable, "-m", "bench", *arguments, "--run", "long", "--trials", str(trials)],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    run, samples, began = psutil.Process(process.pid), list[Sample](), time.monotonic()
    recorded = results / "trials" / "long"
    while process.poll() is None:
        done = len(os.listdir(recorded)) if recorded.exists() else 0
        if 0 < done < trials:  # at its end, the run loads its results
            try:
                samples.append(sample(run, temporary))
            except psutil.NoSuchProcess:  # a rank that has just ended
                continue
        time.sleep(0.25)
    done = len(list(recorded.glob("*.parquet")))
    print(f"{done} trials in {time.monotonic() - began:.0f} s, {len(samples)} samples")
    if process.returncode or done != trials:
        sys.exit(f"the run ended with exit code {process.returncode} and {done} trials")
    # torch keeps compiled code for later processes.
    remaining = [name for name in os.listdir(temporary) if not name.startswith("torchinductor_")]
    if remaining:
        sys.exit(f"left in temporary folders: {remaining}")
    return samples


def typical(samples: Sequence[Sample], name: str) -> float:
    """Returns the median of memory, and the minimum of everything else."""
    values = [sample[name] for sample in samples]
    return statistics.median(values) if name.endswith("_bytes") else min(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=2000)
    given = parser.parse_args()
    shared = set(os.listdir(SHARED_MEMORY))
    with tempfile.TemporaryDirectory() as folder:
        samples = watched(given.trials, Path(folder))
    grown, tenth = False, max(1, len(samples) // 10)
    for name in samples[0]:
        first, last = typical(samples[:tenth], name), typical(samples[-tenth:], name)
        allowed = MOST_BYTES if name.endswith("_bytes") else 0
        grown |= last - first > allowed
        print(f"{name}: {first:.0f}, at the end {last:.0f} ({last - first:+.0f})")
    remaining = sorted(set(os.listdir(SHARED_MEMORY)) - shared)
    print(f"files in shared memory: {len(remaining)} more {remaining[:3]}")
    sys.exit(1 if grown or remaining else 0)


if __name__ == "__main__":
    main()
