"""Parameter servers with a planted mistake or failure."""

import os
import signal
from typing import Any, Literal

from harness.seam import Batch, Job, TrainStep
from harness.strategies.parameter_server import ParameterServer


class ParameterServerTraps(ParameterServer):
    """A parameter server with one mistake."""

    trap: Literal["none", "never_fetches", "deaf_to_one"] = "none"
    """Workers keep their initial parameters, or the server ignores one worker's gradients."""

    def setup(self, job: Job) -> TrainStep:
        from harness.strategies import parameter_server

        average = parameter_server.average

        def average_without_worker_1(parameters: Any, pushes: Any) -> None:
            heard = [push for push in pushes if push[0] != 1]
            if heard:
                average(parameters, heard)

        if self.trap == "never_fetches":
            parameter_server.take = lambda parameters, fetched: None
        if self.trap == "deaf_to_one":
            parameter_server.average = average_without_worker_1
        return super().setup(job)


class ParameterServerFaulty(ParameterServer):
    """A parameter server with one process that fails at step 2."""

    fault: Literal["raises", "killed"] = "raises"
    """How the process fails."""
    rank: int = 0
    """Rank of the failing process."""

    def setup(self, job: Job) -> TrainStep:
        train = super().setup(job)

        def step(batch: Batch) -> Any:
            if job.rank == self.rank and batch.step == 2:
                if self.fault == "raises":
                    raise ValueError("the planted mistake")
                os.kill(os.getpid(), signal.SIGKILL)
            return train(batch)

        return step
