"""`python -m bench.gpu_check.child CORES MODULE WORDS...`: becomes `python -m MODULE WORDS...` on
these cores, and ends when its parent does.

This needs its own process because a check has threads: no Python code is safe after a fork from one
of them.
"""

from __future__ import annotations

import os
import sys

from harness.host.process import die_with_parent


def main(cores: str, *words: str) -> None:
    die_with_parent()
    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    os.execv(sys.executable, [sys.executable, "-m", *words])


if __name__ == "__main__":
    main(*sys.argv[1:])
