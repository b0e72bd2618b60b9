"""One process, one device: the reference of every parity check and of scaling efficiency."""

from harness.errors import Refused
from harness.strategy import Job, Layout, Strategy, TrainStep
from harness.training import standard_step


class Single(Strategy):
    """One process on one device."""

    process_group = False
    synchronizes_batch_norm = True

    def layout(self, devices: int) -> Layout:
        if devices > 1:
            raise Refused(f"single runs on 1 device, not on {devices}")
        return Layout()

    def setup(self, job: Job) -> TrainStep:
        model = job.model()
        optimizer = job.optimizer(model.parameters())
        job.expose(model, optimizer)
        return standard_step(job, model, optimizer)
