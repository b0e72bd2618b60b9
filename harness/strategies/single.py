"""One process on one device: the reference of every parity check and of scaling efficiency."""

from harness.strategy import Job, Strategy, TrainStep
from harness.training import standard_step


class Single(Strategy):
    """One process on one device."""

    process_group = False
    max_devices = 1

    def setup(self, job: Job) -> TrainStep:
        model = job.model()
        optimizer = job.optimizer(model.parameters())
        job.expose(model, optimizer)
        return standard_step(job, model, optimizer)
