"""DDP that takes a stated share more time for each step, for tests of what a comparison sees."""

from __future__ import annotations

import time
from typing import Any

from pydantic import Field

from harness.strategies.ddp import Ddp
from harness.strategy import Job, TrainStep


class Slowed(Ddp):
    """DDP whose every step is followed by a wait of `percent` of the time that it took."""

    percent: float = Field(default=0.0, ge=0)
    """How much more."""

    def setup(self, job: Job) -> TrainStep:
        step, share = super().setup(job), self.percent / 100

        def slowed(batch: Any) -> Any:
            begin = time.perf_counter()
            loss = step(batch)
            end = time.perf_counter()
            while time.perf_counter() < end + share * (end - begin):
                pass
            return loss

        return slowed
