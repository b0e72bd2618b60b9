"""DDP that slows down between runs, to test what a nightly job detects."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from harness.seam import Job, TrainStep
from harness.strategies.ddp import Ddp


class Planted(Ddp):
    """DDP whose steps take 0.2 s, or 0.4 s while a file exists.

    Steps this long make other load on the machine irrelevant. In every three consecutive launches,
    one is 6% faster and one 6% slower. Runs of three launches thus differ no more than expected.
    """

    file: str = ""
    """Path of the file that doubles the step time; launches are counted in a file next to it."""

    def setup(self, job: Job) -> TrainStep:
        step = super().setup(job)
        if job.rank:  # waits for rank 0
            return step
        launches = Path(f"{self.file}.launches")
        before = launches.stat().st_size if launches.exists() else 0
        launches.write_text("." * (before + 1))
        spread = (0.94, 1.0, 1.06)[before % 3]
        wait = 0.2 * spread * (2 if Path(self.file).exists() else 1)

        def planted(batch: Any) -> Any:
            begin = time.perf_counter()
            loss = step(batch)
            time.sleep(max(0.0, begin + wait - time.perf_counter()))
            return loss

        return planted
