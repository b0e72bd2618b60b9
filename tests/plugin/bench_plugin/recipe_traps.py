"""Easily made mistakes in clipping, schedule, decay and loss."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from harness.seam import Batch, Job, Strategy, TrainStep
from harness.strategies.deepspeed_pipeline import DeepspeedPipeline
from harness.strategies.fsdp2 import Fsdp2
from harness.strategies.pipeline import Pipeline
from harness.strategies.tensor import TensorParallel


class RecipeTraps(Strategy):
    """Hand-written data parallelism with one mistake."""

    mistake: Literal[
        "none",
        "clip_before_reduction",
        "clip_each_micro_batch",
        "clip_before_unscaling",
        "schedule_per_process",
        "decay_on_all",
        "mean_of_means",
        "other_norm_on_rank_1",
    ] = "none"
    """The planted mistake."""

    def setup(self, job: Job) -> TrainStep:
        import torch
        from torch.nn.utils import clip_grad_norm_

        from harness.seam.job import loss_scaler
        from harness.strategies.collectives import average_gradients

        model, scaler = job.model(), loss_scaler(job)
        parameters = list(model.parameters())
        cell, most = job.cell, job.cell.clip_norm
        assert most is not None
        if self.mistake == "decay_on_all":
            job.cell = cell.model_copy(update={"decay": "all"})
        optimizer = job.optimizer(parameters)
        job.cell = cell
        scheduler = job.scheduler(optimizer)
        assert scheduler is not None
        job.register(model, optimizer)

        def step(batch: Batch) -> torch.Tensor:
            total = torch.zeros(())
            for part in batch.split(cell.micro_batches):
                if self.mistake == "mean_of_means":
                    part = dataclasses.replace(part, label_tokens=None)
                loss = job.loss(model, part) / cell.micro_batches
                scaler.scale(loss).backward()
                total += loss.detach()
                if self.mistake == "clip_each_micro_batch":
                    clip_grad_norm_(parameters, most)
            if self.mistake == "clip_before_reduction":
                clip_grad_norm_(parameters, most)
            average_gradients(parameters)
            if self.mistake == "clip_before_unscaling":
                job.recipe.gradient_norm = clip_grad_norm_(parameters, most) / scaler.get_scale()
                scaler.unscale_(optimizer)
            else:
                scaler.unscale_(optimizer)
                job.recipe.gradient_norm = clip_grad_norm_(parameters, most)
            if self.mistake == "other_norm_on_rank_1" and job.rank == 1:
                job.recipe.gradient_norm *= 1.01
            scaler.step(optimizer)
            scaler.update()
            for _ in range(cell.devices if self.mistake == "schedule_per_process" else 1):
                scheduler.step()
            optimizer.zero_grad()
            return total

        return step


class LocalNorm(Fsdp2):
    """FSDP2 that clips by the norm of each rank's own shards."""

    def setup(self, job: Job) -> TrainStep:
        import torch

        def clip(most: float) -> Any:
            assert job.train_state is not None
            shards: Any = [p.grad for p in job.train_state.model.parameters()]
            local = [shard.to_local() for shard in shards]
            norm = torch.nn.utils.get_total_norm(local)
            for shard in local:
                shard *= torch.clamp(most / (norm + 1e-6), max=1.0)
            return norm

        job.recipe.clip = clip
        return super().setup(job)


class PipelineNorm(Pipeline):
    """A pipeline that clips by each stage's own norm, or counts tied parameters twice."""

    mistake: Literal["own_stage", "tied_twice"] = "own_stage"
    """The planted mistake."""

    def setup(self, job: Job) -> TrainStep:
        from harness.seam.pipelining import Pipe

        wrong: Any = property(lambda pipe: None if self.mistake == "own_stage" else [])
        setattr(Pipe, "ranks" if self.mistake == "own_stage" else "copies", wrong)
        return super().setup(job)


class TensorNorm(TensorParallel):
    """Tensor parallelism whose norm counts whole parameters on each rank, or only local shards."""

    mistake: Literal["whole_twice", "own_shards"] = "whole_twice"
    """The planted mistake."""

    def setup(self, job: Job) -> TrainStep:
        import torch
        import torch.distributed as dist

        def clip(most: float) -> Any:
            assert job.train_state is not None
            gradients: Any = [p.grad for p in job.train_state.model.parameters()]
            local = [g.to_local() if hasattr(g, "to_local") else g for g in gradients]
            squared = torch.nn.utils.get_total_norm(local) ** 2
            if self.mistake == "whole_twice":
                dist.all_reduce(squared)
            norm = squared.sqrt()
            for gradient in local:
                gradient *= torch.clamp(most / (norm + 1e-6), max=1.0)
            return norm

        job.recipe.clip = clip
        return super().setup(job)


class FirstStageNorm(DeepspeedPipeline):
    """DeepSpeed's unpatched pipeline, whose norm is that of the first stage."""

    def setup(self, job: Job) -> TrainStep:
        from harness.strategies import deepspeed_pipeline

        deepspeed_pipeline.count_in_norm = lambda stage: None
        return super().setup(job)
