"""The folder outside the checkout in which things are kept from run to run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


def cache_folder() -> Path:
    """Where prepared data and reference runs are kept: $PARALLELISM_BENCH_CACHE, else the user's
    cache folder."""
    own = os.environ.get("PARALLELISM_BENCH_CACHE")
    base = (
        Path(own)
        if own
        else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "parallelism-bench"
    )
    base.mkdir(parents=True, exist_ok=True)
    return base
