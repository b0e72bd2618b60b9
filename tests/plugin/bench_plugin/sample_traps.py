"""Mistakes in dropout masks, the routers' balancing loss and packed documents."""

from __future__ import annotations

import dataclasses
from typing import Literal

from harness.seam import Batch, Job, Strategy, TrainStep
from harness.strategies._accelerate import recompute_by_transformers


class SampleTraps(Strategy):
    """Hand-written data parallelism with one mistake; transformers recomputes activations."""

    mistake: Literal[
        "none",
        "same_masks_on_all_ranks",
        "other_masks_in_recomputation",
        "no_balance",
        "balance_only_reported",
        "balance_times_ranks",
        "balance_of_first_micro_batch",
        "attention_across_documents",
        "one_document",
    ] = "none"
    """The planted mistake."""

    def setup(self, job: Job) -> TrainStep:
        import torch
        import torch.distributed as dist
        from torch import Tensor

        from harness.strategies.collectives import average_gradients

        model = job.model(recompute_by_transformers)
        parameters = list(model.parameters())
        optimizer = job.optimizer(parameters)
        job.register(model, optimizer)
        mistake, parts = self.mistake, job.cell.micro_batches

        def weighted(factor: float) -> Job:
            weight = factor * job.cell.balance_weight
            return dataclasses.replace(
                job, cell=job.cell.model_copy(update={"balance_weight": weight})
            )

        def call(inputs: Tensor, **named: Tensor) -> Tensor:
            if mistake == "attention_across_documents":
                named["attention_mask"] = torch.ones_like(inputs)
            if mistake == "one_document":
                named.clear()
            output: Tensor = model(inputs, **named)
            return output

        def losses(part: Batch, first: bool) -> tuple[Tensor, Tensor]:
            """Returns the loss to train on, and the one to report."""
            right = job.loss(call, part)
            if mistake == "no_balance":
                return (wrong := weighted(0).loss(call, part)), wrong
            if mistake == "balance_only_reported":
                return weighted(0).loss(call, part), right
            if mistake == "balance_times_ranks":
                return (wrong := weighted(job.cell.devices).loss(call, part)), wrong
            if mistake == "balance_of_first_micro_batch":
                return (wrong := weighted(parts if first else 0).loss(call, part)), wrong
            return right, right

        def step(batch: Batch) -> Tensor:
            if mistake == "same_masks_on_all_ranks":
                assert batch.keys is not None
                dist.broadcast(batch.keys, 0)
            total = torch.zeros(())
            for number, part in enumerate(batch.split(parts)):
                trained, reported = losses(part, number == 0)
                if mistake == "other_masks_in_recomputation":
                    assert part.keys is not None
                    job.recipe.masks.keys = part.keys.flip(0)
                (trained / parts).backward()
                total += reported.detach() / parts
            average_gradients(parameters)
            optimizer.step()
            optimizer.zero_grad()
            return total

        return step
