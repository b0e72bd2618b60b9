"""The folder outside the checkout in which data and results of earlier runs are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Folder of prepared data and reference runs: $PARALLELISM_BENCH_CACHE, else
    `parallelism-bench` in the user's cache folder. It is made where it is missing."""
    users = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("PARALLELISM_BENCH_CACHE") or Path(users) / "parallelism-bench")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
