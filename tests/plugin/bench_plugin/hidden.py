"""Data parallelism that defers part of each step's work to a thread.

The control must not make such a strategy look faster.
"""

from __future__ import annotations

import threading
import time

from harness.seam import Batch, Job, Strategy, TrainStep, standard_step


class Hidden(Strategy):
    """DDP with extra processor work in each step."""

    milliseconds: float = 0.0
    """Processor time of the extra work per step, in milliseconds."""
    in_thread: bool = False
    """Whether a thread does the extra work after the step, instead of the step itself."""

    def setup(self, job: Job) -> TrainStep:
        from torch.nn.parallel import DistributedDataParallel

        model = DistributedDataParallel(job.model())
        optimizer = job.optimizer(model.parameters())
        job.register(model, optimizer)
        train = standard_step(job, model, optimizer)
        wanted = threading.Semaphore(0)

        def work() -> None:
            begin = time.thread_time()
            while time.thread_time() - begin < self.milliseconds / 1000:
                pass

        def later() -> None:
            while wanted.acquire():
                time.sleep(0.001)  # the step has ended by then
                work()

        if self.in_thread:
            threading.Thread(target=later, daemon=True).start()

        def step(batch: Batch) -> object:
            loss = train(batch)
            if self.in_thread:
                wanted.release()
            elif self.milliseconds:
                work()
            return loss

        return step  # type: ignore[return-value]
