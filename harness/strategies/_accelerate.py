"""Accelerate's own object for a job, and whether it found what the cell says."""

from __future__ import annotations

from typing import Any

from harness.strategies._accelerate_config import mixed_precision
from harness.strategies._deepspeed import settle
from harness.strategy.job import Job
from harness.strategy.step import LOSS_SCALE


def make_accelerator(
    job: Job, fsdp2: dict[str, Any] | None, deepspeed: dict[str, Any] | None, told: bool
) -> Any:
    """For FSDP2 by these settings, DeepSpeed by this config, or DDP.

    `told`: `accelerate launch` has said so already, by variables.
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
    handlers: list[Any] = [GradScalerKwargs(init_scale=LOSS_SCALE)]
    given: dict[str, Any] = (
        {} if told or deepspeed else {"mixed_precision": mixed_precision(job.cell)}
    )
    if deepspeed:
        settle(job.device.type, job.local_processes)
        handlers.append(InitProcessGroupKwargs(backend="gloo" if cpu else "nccl"))
        given |= (
            {}
            if told
            else {
                "deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=deepspeed, zero3_init_flag=False)
            }
        )
    if fsdp2 and not told:
        given["fsdp_plugin"] = FullyShardedDataParallelPlugin(**fsdp2)
    # DeepSpeed finds its device itself, and is left out where `cpu` is said.
    made = Accelerator(
        cpu=cpu and not deepspeed,
        gradient_accumulation_steps=job.cell.micro_batches,
        kwargs_handlers=handlers,
        **given,
    )
    torch.set_num_threads(job.threads)  # it takes all cores where OMP_NUM_THREADS is not set
    return made


def pretend_gpus() -> None:
    """Accelerate looks for FSDP only where it believes itself on GPUs."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU


def verify(job: Job, accelerator: Any, fsdp2: bool, deepspeed: bool) -> None:
    """Raises RuntimeError where Accelerate sees other ranks, another engine, precision or number of
    threads than the cell has."""
    import torch
    from accelerate.utils import DistributedType

    plain = DistributedType.MULTI_CPU if job.device.type == "cpu" else DistributedType.MULTI_GPU
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
