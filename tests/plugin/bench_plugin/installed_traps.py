"""Mistakes that newer features of installed libraries make easy."""

from __future__ import annotations

from typing import Any, Literal

from harness.seam import Batch, Cell, Job, TrainStep, Workload
from harness.strategies.ddp import Ddp
from harness.strategies.deepspeed_auto import DeepspeedAuto
from harness.strategies.fsdp2_tensor import Fsdp2Tensor
from harness.strategies.lightning_fabric import LightningFabric


class FabricTraps(LightningFabric):
    """Lightning Fabric with one mistake, and with FSDP on CPUs, where Fabric names no device."""

    trap: Literal["none", "inner_model", "undivided", "local_norm"] = "none"
    """Call the model that Fabric has wrapped, do not divide by the number of micro-batches, or
    clip by the norm of a rank's shards."""

    def check(self, cell: Cell, workload: Workload) -> None: ...

    def setup(self, job: Job) -> TrainStep:
        import torch
        from lightning_fabric import Fabric
        from lightning_fabric.connector import _Connector
        from lightning_fabric.strategies.fsdp import FSDPStrategy
        from lightning_fabric.strategies.strategy import Strategy
        from lightning_fabric.wrappers import _FabricModule
        from torch.distributed.fsdp import FullyShardedDataParallel

        backward, wrap = Fabric.backward, FullyShardedDataParallel.__init__

        def on_cpu(self: Any, *arguments: Any, **named: Any) -> None:
            wrap(self, *arguments, **named | {"device_id": torch.device("cpu")})

        FullyShardedDataParallel.__init__ = on_cpu  # type: ignore[method-assign]
        _Connector._check_strategy_and_fallback = lambda self: None
        if self.trap == "inner_model":
            _FabricModule.forward = lambda self, *a, **named: self._original_module(*a, **named)
        if self.trap == "undivided":
            Fabric.backward = lambda self, loss: backward(self, loss * job.cell.micro_batches)
        if self.trap == "local_norm":
            FSDPStrategy.clip_gradients_norm = Strategy.clip_gradients_norm
        return super().setup(job)


def other_samples(step: TrainStep, ranks: int, rank: int, from_step: int = 0) -> TrainStep:
    """Trains each tensor-parallel rank with other samples."""

    def cut(batch: Batch) -> Any:
        return step(batch if batch.step < from_step else batch.part(rank % ranks, ranks))

    return cut


class Fsdp2TensorTraps(Fsdp2Tensor):
    """FSDP2 x tensor parallelism with one mistake."""

    trap: Literal["none", "other_samples", "local_norm"] = "none"
    """Other samples on each tensor-parallel rank, or clipping by the norm of a rank's shards."""

    def setup(self, job: Job) -> TrainStep:
        import torch

        def by_own_shards(most: float) -> Any:
            assert job.train_state is not None
            gradients = [p.grad.to_local() for p in job.train_state.model.parameters()]
            norm = torch.nn.utils.get_total_norm(gradients)
            for gradient in gradients:
                gradient.mul_((most / norm).clamp(max=1.0))
            return norm

        if self.trap == "local_norm":
            job.recipe.clip = by_own_shards
        step = super().setup(job)
        return other_samples(step, self.tensor, job.rank) if "other" in self.trap else step


class AutotpTraps(DeepspeedAuto):
    """AutoTP with one mistake."""

    trap: Literal["none", "other_samples", "other_samples_later", "unreduced"] = "none"
    """Other samples on each rank, from the first or a later step on, or gradients of a column-wise
    layer's input that are not added up."""

    def setup(self, job: Job) -> TrainStep:
        from deepspeed.module_inject.layers import ColumnParallel

        if self.trap == "unreduced":
            ColumnParallel.backward = staticmethod(lambda context, gradient: (None, gradient))
        step = super().setup(job)
        if self.trap.startswith("other_samples"):
            return other_samples(step, self.tensor, job.rank, 2 * self.trap.endswith("later"))
        return step


class AutoepTraps(DeepspeedAuto):
    """AutoEP with one mistake."""

    split: Literal["experts"] = "experts"
    """Experts are divided."""
    trap: Literal["none", "frozen_experts", "unnormalised"] = "none"
    """Leave the experts out of the optimizer, or do not normalise the weights of a token's
    experts."""

    def config(self, *arguments: Any) -> dict[str, object]:
        config: Any = super().config(*arguments)
        if self.trap == "unnormalised":
            config["expert_parallel"]["route_norm"] = False
        return config  # type: ignore[no-any-return]

    def setup(self, job: Job) -> TrainStep:
        step = super().setup(job)
        assert job.train_state is not None
        for name, parameter in job.train_state.model.named_parameters():
            if self.trap == "frozen_experts" and ".experts." in name:
                parameter.register_hook(lambda gradient: 0 * gradient)
        return step


class LossTraps(Ddp):
    """DDP whose fused loss or offloaded activations have one mistake."""

    trap: Literal[
        "none",
        "mean_of_chunks",
        "divided_by_all",
        "reused_buffer",
        "stored_in_bf16",
    ] = "none"
    """A mean of chunks' means, a sum divided by the number of all tokens, one
    buffer for all activations of a shape, or activations stored in bf16."""

    def setup(self, job: Job) -> TrainStep:
        import torch
        from torch.autograd import graph

        from harness.workloads import fused_loss

        by_torch = fused_loss._by_torch

        def wrong(rows: Any, weight: Any, targets: Any, bias: Any, reduction: str) -> Any:
            labelled = (targets != -100).sum()
            if self.trap == "divided_by_all":
                total = by_torch(rows, weight, targets, bias, reduction)
                return total * labelled / len(targets)
            pairs = list(zip(rows.chunk(4), targets.chunk(4), strict=True))
            means = [by_torch(part, weight, those, bias, "mean") for part, those in pairs]
            return torch.stack(means).nanmean() * (labelled if reduction == "sum" else 1)

        if self.trap in ("mean_of_chunks", "divided_by_all"):
            fused_loss._by_torch = wrong
        buffers: dict[Any, Any] = {}

        def pack(tensor: Any) -> Any:
            if self.trap == "stored_in_bf16" and tensor.is_floating_point():
                return tensor.bfloat16(), tensor.dtype
            key = tensor.shape, tensor.dtype
            return buffers.setdefault(key, torch.empty_like(tensor)).copy_(tensor), tensor.dtype

        class Wrong(graph.saved_tensors_hooks):
            def __init__(self, **_: Any) -> None:
                super().__init__(pack, lambda packed: packed[0].to(packed[1]))

        if self.trap in ("reused_buffer", "stored_in_bf16"):
            graph.save_on_cpu = Wrong  # type: ignore[misc, assignment]
        return super().setup(job)
