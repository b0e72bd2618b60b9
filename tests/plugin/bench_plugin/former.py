"""A strategy as it was written before modules and names of the seam changed: it still trains."""

from harness.cell import Cell
from harness.errors import Refused
from harness.training import standard_step

from harness.strategy import Deviation, Job, Strategy, TrainStep
from harness.workloads import Workload


class Former(Strategy):
    """Averages gradients by hand, under former names."""

    def check(self, cell: Cell, workload: Workload) -> None:
        if cell.devices > 2:
            raise Refused("two devices are enough")

    def deviation(self, cell: Cell, workload: Workload) -> Deviation:
        return Deviation(2e-5, 2e-3, "gradients are averaged one by one")

    def setup(self, job: Job) -> TrainStep:
        import torch.distributed as dist

        model = job.model()
        optimizer = job.optimizer(model.parameters())
        job.expose(model, optimizer)
        assert job.exposed is not None

        def average() -> None:
            for parameter in job.exposed.model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()

        return standard_step(job, model, optimizer, before_update=average)
