"""Strategies that run without errors but train incorrectly; parity must detect each."""

from typing import Literal

from harness.seam import Batch, Job, Strategy, TrainStep


class Broken(Strategy):
    """Data parallelism with one mistake."""

    mistake: Literal[
        "none",
        "no_synchronization",
        "scaled_loss",
        "summed_gradients",
        "clipping",
        "repeated_batch",
        "lost_micro_batch",
        "other_seed",
        "frozen_tensor",
        "no_weight_decay",
        "undecayed_norm",
        "skipped_steps",
        "frozen_update",
        "lower_precision",
    ] = "none"
    """The planted mistake."""
    from_step: int = 0
    """First step with the mistake."""

    def setup(self, job: Job) -> TrainStep:
        import torch
        import torch.distributed as dist

        model = job.workload.build(job.cell.seed + (self.mistake == "other_seed"))
        if self.mistake == "frozen_tensor":
            next(model.parameters()).requires_grad_(False)
        optimizer = job.optimizer([p for p in model.parameters() if p.requires_grad])
        job.register(model, optimizer)
        size = dist.get_world_size()
        norms = [p for n, p in model.named_parameters() if n.endswith("norm.weight")]
        batches: list[Batch] = []

        def step(batch: Batch) -> torch.Tensor:
            batches.append(batch)
            mistake = self.mistake if batch.step >= self.from_step else "none"
            if mistake == "repeated_batch" and batch.step == max(3, self.from_step):
                batch = batches[-2]
            if mistake == "no_weight_decay":
                optimizer.param_groups[0]["weight_decay"] = 0.0
            if mistake == "lost_micro_batch":
                batch = next(batch.split(2))
            with torch.autocast("cpu", torch.bfloat16, enabled=mistake == "lower_precision"):
                loss = job.loss(model, batch)
            (loss * 2 if mistake == "scaled_loss" else loss).backward()
            if mistake != "no_synchronization":
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        dist.all_reduce(parameter.grad)
                        if mistake != "summed_gradients":
                            parameter.grad /= size
            if mistake == "clipping":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if mistake != "frozen_update" and not (mistake == "skipped_steps" and batch.step % 2):
                optimizer.step()
            if mistake == "undecayed_norm":
                with torch.no_grad():
                    norms[0].div_(1 - job.cell.learning_rate * job.cell.weight_decay)
            optimizer.zero_grad()
            return loss.detach()

        return step
