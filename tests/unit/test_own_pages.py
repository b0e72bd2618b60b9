"""A forked process's copies of its parent's pages, counted as page faults."""

from __future__ import annotations

import subprocess
import sys

import pytest

from harness.host.process import copy_shared_pages

PAGES = 4096
FORKED = f"""
import mmap, os, resource, sys
from harness.host.process import copy_shared_pages
import numpy
memory = mmap.mmap(-1, {PAGES} * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_NOHUGEPAGE)
def write():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for page in range({PAGES}):
        memory[page * mmap.PAGESIZE] = 1
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
write()
if os.fork() == 0:
    if sys.argv[1] == "copied":
        copy_shared_pages()
    print(write())
    os._exit(0)
os.wait()
"""


def faults(how: str) -> int:
    command = [sys.executable, "-u", "-c", FORKED, how]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_no_page_is_copied_later() -> None:
    if not copy_shared_pages():
        pytest.skip("this kernel has no MADV_POPULATE_WRITE")
    assert faults("shared") >= PAGES
    assert faults("copied") < PAGES / 20
