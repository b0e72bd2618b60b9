"""DDP with mistakes in parameter-efficient fine-tuning."""

from typing import Literal

from harness.seam import Batch, Job, TrainStep
from harness.strategies.ddp import Ddp


class VariantAstray(Ddp):
    """DDP with one mistake in handling the adapter."""

    mistake: Literal["none", "thawed", "unseeded", "first_positions"] = "none"
    """Train the frozen weights, give the adapter a random seed, or compute the loss at the virtual
    tokens' positions."""

    def setup(self, job: Job) -> TrainStep:
        import torch

        workload = job.workload
        if self.mistake == "thawed":
            make = job.model
            job.model = lambda: make().requires_grad_(True)  # type: ignore[method-assign]
        if self.mistake == "unseeded":
            setattr(type(workload), "_adapter_seed", lambda self, seed: torch.seed())  # noqa: B010
        if self.mistake == "first_positions":

            def loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
                return workload.loss(
                    model(batch.inputs).logits[:, : batch.inputs.shape[1]], batch.labels
                )

            job.loss = loss  # type: ignore[method-assign,assignment]
        return super().setup(job)
