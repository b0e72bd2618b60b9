"""A correct strategy from another package."""

from harness.seam import Job, Strategy, TrainStep, standard_step


class Outside(Strategy):
    """Averages gradients with explicit all-reduces."""

    def setup(self, job: Job) -> TrainStep:
        import torch.distributed as dist

        model = job.model()
        optimizer = job.optimizer(model.parameters())
        job.register(model, optimizer)

        def average() -> None:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()

        return standard_step(job, model, optimizer, before_update=average)
