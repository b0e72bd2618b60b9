"""DDP slowed by a given percentage, to test what a comparison detects."""

from __future__ import annotations

import time
from typing import Any

from pydantic import Field

from harness.seam import Job, TrainStep
from harness.strategies.ddp import Ddp


class Slowed(Ddp):
    """DDP that waits after each step for `percent` of the step's time."""

    percent: float = Field(default=0.0, ge=0)
    """Extra time per step, in percent."""

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
