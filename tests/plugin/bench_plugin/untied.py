"""A pipeline without the exchange that keeps tied embeddings tied."""

from harness.seam import Job, TrainStep
from harness.strategies.pipeline import Pipeline


class UntiedPipeline(Pipeline):
    """A two-stage pipeline whose copies of the embedding drift apart."""

    def setup(self, job: Job) -> TrainStep:
        from harness.seam.pipelining import Pipe

        Pipe.sum_tied = lambda self: None
        return super().setup(job)
