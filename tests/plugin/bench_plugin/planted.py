"""DDP that becomes slower from one run to the next, for tests of what a nightly job sees."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

from harness.strategies.ddp import Ddp
from harness.strategy import Job, TrainStep


class Planted(Ddp):
    """DDP whose steps last a fifth of a second, give or take 4 % from launch to launch, and twice
    that while a file is there: so long that it does not matter what else the machine does."""

    file: str = ""
    """The file."""

    def setup(self, job: Job) -> TrainStep:
        step = super().setup(job)
        spread = random.Random(os.getppid() * 10_000 + os.getpid() // 10).uniform(0.96, 1.04)
        wait = 0.2 * spread * (2 if Path(self.file).exists() else 1)

        def planted(batch: Any) -> Any:
            begin = time.perf_counter()
            loss = step(batch)
            time.sleep(max(0.0, begin + wait - time.perf_counter()))
            return loss

        return planted
