"""Builds Accelerate's object for a job and verifies that it matches the cell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from harness.strategies._accelerate_config import mixed_precision
from harness.strategies._deepspeed import settle
from harness.strategy import Batch, Job, TrainStep, own_precision
from harness.strategy.step import LOSS_SCALE

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.parallelism_config import ParallelismConfig
    from torch import Tensor, nn
    from torch.optim import Optimizer


def make_accelerator(
    job: Job,
    fsdp2: Mapping[str, object] | None,
    deepspeed: Mapping[str, object] | None,
    launched: bool,
    parallelism: ParallelismConfig | None = None,
) -> Accelerator:
    """Builds an Accelerator for these FSDP2 settings, this DeepSpeed config, or DDP.

    `launched`: `accelerate launch` has passed them by environment variables. `parallelism`: a
    multi-dimensional mesh.
    """
    import torch
    from accelerate import Accelerator
    from accelerate.utils import (
        DeepSpeedPlugin,
        FullyShardedDataParallelPlugin,
        GradScalerKwargs,
        InitProcessGroupKwargs,
    )

    cpu = job.device.type == "cpu"
    if (fsdp2 or parallelism) and cpu:
        pretend_gpus()
    handlers: list[object] = [GradScalerKwargs(init_scale=LOSS_SCALE)]
    given: dict[str, object] = (
        {} if launched or deepspeed else {"mixed_precision": mixed_precision(job.cell)}
    )
    if deepspeed:
        settle(job.device.type, job.local_processes)
        handlers.append(InitProcessGroupKwargs(backend="gloo" if cpu else "nccl"))
        given |= (
            {}
            if launched
            else {
                "deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=deepspeed, zero3_init_flag=False)
            }
        )
    if parallelism:
        given["parallelism_config"] = parallelism
    if fsdp2 and not launched:
        given["fsdp_plugin"] = FullyShardedDataParallelPlugin(**fsdp2)
    # DeepSpeed finds its device itself, and is disabled by `cpu=True`.
    made = Accelerator(
        cpu=cpu and not deepspeed,
        gradient_accumulation_steps=job.cell.micro_batches,
        kwargs_handlers=handlers,
        **given,
    )
    # Accelerate takes all cores if OMP_NUM_THREADS is not set.
    torch.set_num_threads(job.threads)
    return made


def pretend_gpus() -> None:
    """Makes Accelerate believe it is on GPUs, as it requires for FSDP and ParallelismConfig."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU


def verify(job: Job, accelerator: Accelerator, fsdp2: bool, deepspeed: bool) -> None:
    """Raises RuntimeError if Accelerate's rank count, engine, precision or thread count differ from
    the cell's."""
    import torch
    from accelerate.utils import DistributedType

    on_cpus = job.device.type == "cpu" and job.layout.tensor == 1
    plain = DistributedType.MULTI_CPU if on_cpus else DistributedType.MULTI_GPU
    wanted = DistributedType.FSDP if fsdp2 else DistributedType.DEEPSPEED if deepspeed else plain
    if accelerator.num_processes != job.cell.devices:
        raise RuntimeError(
            f"Accelerate sees {accelerator.num_processes} of {job.cell.devices} processes: no"
            " gradient is averaged"
        )
    if accelerator.distributed_type != wanted:
        raise RuntimeError(
            f"Accelerate would train by {accelerator.distributed_type}, not by {wanted}"
        )
    if accelerator.mixed_precision != mixed_precision(job.cell):
        raise RuntimeError(
            f"Accelerate would train in mixed precision {accelerator.mixed_precision}, not in"
            f" {job.cell.precision}"
        )
    if torch.get_num_threads() != job.threads:
        raise RuntimeError(
            f"Accelerate took {torch.get_num_threads()} threads a rank, the cell has {job.threads}"
        )


def train_step(
    job: Job, accelerator: Accelerator, model: nn.Module, optimizer: Optimizer
) -> TrainStep:
    import torch

    plain, parts = own_precision(job), job.cell.micro_batches

    def step(batch: Batch) -> Tensor:
        total = torch.zeros((), device=job.device)
        for part in batch.split(parts):
            with accelerator.accumulate(model):
                loss = plain.loss(model, part)
                # Divides by the number of micro-batches; DeepSpeed's also steps.
                accelerator.backward(loss)
                optimizer.step()  # no-op before the last micro-batch
                optimizer.zero_grad()
            total += loss.detach() / parts
        return total

    return step
