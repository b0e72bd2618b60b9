"""DDP that becomes slower from one run to the next, for tests of what a nightly job sees."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from harness.strategies.ddp import Ddp
from harness.strategy import Job, TrainStep


class Planted(Ddp):
    """DDP whose steps last a fifth of a second, and twice that while a file is there: so long that
    it does not matter what else the machine does. Of three launches in a row one is 6 % shorter and
    one 6 % longer, so that runs of three launches differ from each other no more than expected."""

    file: str = ""
    """The file; the launches so far are counted beside it."""

    def setup(self, job: Job) -> TrainStep:
        step = super().setup(job)
        if job.rank:  # it waits for the first
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
