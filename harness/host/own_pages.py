from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of linux/mman.h, since Linux 5.14
_PRESENT = 1 << 63  # Documentation/admin-guide/mm/pagemap.rst
_BYTES_PER_ENTRY = 8


def copy_shared_pages() -> int:
    """Copies each present writable page, so that a forked rank's first steps need not. Returns
    their bytes; 0 before Linux 5.14."""
    libc, page = ctypes.CDLL(None), os.sysconf("SC_PAGE_SIZE")
    copied = 0
    for first, end in _present_pages(page):
        start, length = first * page, (end - first) * page
        if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _POPULATE_WRITE) == 0:
            copied += length
    return copied


def _present_pages(page: int) -> Iterator[tuple[int, int]]:
    """Yields runs of present pages in private writable mappings: first and past the last."""
    import numpy as np

    with open("/proc/self/maps") as maps, open("/proc/self/pagemap", "rb", buffering=0) as entries:
        for line in maps.read().splitlines():
            addresses, access, *_ = line.split()
            if access[1] + access[3] != "wp":
                continue
            first, end = (int(address, 16) // page for address in addresses.split("-"))
            entries.seek(first * _BYTES_PER_ENTRY)
            content = entries.read((end - first) * _BYTES_PER_ENTRY)
            present = np.frombuffer(content, np.uint64) & np.uint64(_PRESENT) != 0
            edges = np.flatnonzero(np.diff(np.concatenate(([False], present, [False])).astype(int)))
            for begin, stop in edges.reshape(-1, 2).tolist():
                yield first + begin, first + stop
