"""A pipeline without the exchange that keeps tied embeddings tied."""

from harness.strategies.pipeline import Pipeline
from harness.strategy import Job, TrainStep


class UntiedPipeline(Pipeline):
    """A two-stage pipeline whose copies of the embedding drift apart."""

    def setup(self, job: Job) -> TrainStep:
        from harness.strategy.pipelining import Pipe

        Pipe.sum_tied = lambda self: None
        return super().setup(job)
