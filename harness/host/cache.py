"""Cache folder outside the checkout."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Returns the folder of prepared data and reference runs; creates it if needed.

    $PARALLELISM_BENCH_CACHE, or else `parallelism-bench` in the user's cache folder.
    """
    users = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("PARALLELISM_BENCH_CACHE") or Path(users) / "parallelism-bench")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
