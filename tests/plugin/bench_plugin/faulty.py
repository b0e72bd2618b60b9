"""Strategies that fail: each must be recorded with its reason and leave no process running."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from typing import Literal

from harness.seam import Batch, Job, Strategy, TrainStep


class Faulty(Strategy):
    """Data parallelism whose last rank fails."""

    fault: Literal[
        "raises",
        "killed",
        "exits",
        "hangs",
        "out_of_memory",
        "nan",
        "leaves_children",
        "raises_in_setup",
        "shows_nothing",
        "slow",
        "tells_secrets",
        "segfaults",
        "floods_its_log",
        "writes_no_text",
        "stops_itself",
        "loops_in_c",
        "forks",
        "eats_memory",
    ] = "raises"
    """How the rank fails."""
    at_step: int = 2
    """Step at which the rank fails."""

    def setup(self, job: Job) -> TrainStep:
        import torch
        import torch.distributed as dist

        model = job.model()
        optimizer = job.optimizer(model.parameters())
        last = job.rank == job.layout.processes - 1
        if self.fault == "raises_in_setup" and last:
            raise ValueError("the planted mistake in setup")
        if self.fault != "shows_nothing":
            job.register(model, optimizer)
        hoard = []

        def step(batch: Batch) -> torch.Tensor:
            if last and batch.step == self.at_step:
                if self.fault == "tells_secrets":
                    secret = os.environ["PLANTED_TOKEN"]
                    print("x" * 3990 + secret, "y" * 3985, flush=True)  # cut by the log's tail
                    raise ValueError(f"401 for https://me:{secret}@example.org?key={secret}")
                if self.fault == "segfaults":
                    ctypes.string_at(0)
                if self.fault == "floods_its_log":
                    for _ in range(50):
                        os.write(1, b"flood " * (2**20 // 6))
                    raise ValueError("the planted flood")
                if self.fault == "writes_no_text":
                    os.write(1, bytes(range(256)) * 40)
                    raise ValueError("the planted bytes \udcff")
                if self.fault == "stops_itself":
                    os.kill(os.getpid(), signal.SIGSTOP)
                if self.fault == "loops_in_c":
                    re.match("(a+)+b", "a" * 60)  # runs forever, holding the GIL
                if self.fault == "forks":
                    for _ in range(24):
                        subprocess.Popen(["sleep", "3600"], start_new_session=True)
                    raise ValueError("the planted children")
                if self.fault == "raises":
                    raise ValueError("the planted mistake")
                if self.fault == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if self.fault == "exits":
                    os._exit(0)
                if self.fault == "hangs":
                    time.sleep(3600)
                if self.fault == "leaves_children":
                    command = "import os, time; os.setsid(); time.sleep(3600)"
                    subprocess.Popen([sys.executable, "-c", command], start_new_session=True)
                if self.fault == "eats_memory":  # exceeds its control group's limit
                    for _ in range(32):
                        hoard.append(torch.ones(2**26))
                if self.fault == "out_of_memory":
                    hoard.append(torch.ones(2**28))
            if self.fault == "slow":
                time.sleep(0.3)
            loss = job.loss(model, batch)
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach() * (
                float("nan") if self.fault == "nan" and batch.step >= self.at_step else 1.0
            )

        return step
