from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from harness.cell.errors import Refused, Unavailable
from harness.cell.training import EXACT, Batch, Layout, States, Tolerance, TrainStep
from harness.host.packages import how_to_install
from harness.seam import Capabilities, Cell, Job, ModelFacts, Strategy
from harness.seam.formulas import fsdp_transient, model_states, whole_model_states
from harness.seam.job import LOSS_SCALE, own_precision
from harness.seam.recipe import whole
from harness.strategies._accelerate_config import fsdp2_settings, mixed_precision, state_dict_type
from harness.strategies._deepspeed import settle
from harness.strategies._half import WHOLLY, half_throughout
from harness.strategies.deepspeed import Deepspeed
from harness.workloads import Workload, make_workload
from harness.workloads.counts import model_facts
from harness.workloads.recompute import checkpoint_arguments

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.scheduler import AcceleratedScheduler
    from torch import Tensor, nn
    from torch.optim import Optimizer


class AccelerateEngine(Strategy):
    requires = ("accelerate",)
    capabilities = Capabilities(reshards=False)

    engine: Literal["ddp", "zero2", "zero3", "fsdp2"] = "ddp"
    """Engine that wraps the model: DDP, DeepSpeed ZeRO stage 2 or 3, or FSDP2."""

    @property
    def zero(self) -> Deepspeed | None:
        """Equivalent strategy if DeepSpeed is the engine; None for other engines."""
        stages: dict[str, Literal[2, 3]] = {"zero2": 2, "zero3": 3}
        return Deepspeed(stage=stages[self.engine]) if self.engine in stages else None

    @property
    def checkpoints(self) -> tuple[str, ...]:
        return {"ddp": ("full",), "fsdp2": ("full", "sharded")}.get(self.engine, ("sharded",))

    def check(self, cell: Cell, workload: Workload) -> None:
        if cell.precision == "fp16" and cell.device == "cpu" and not self.zero:
            raise Unavailable(
                "Accelerate has no fp16 on CPUs and would silently train in fp32; use a GPU or bf16"
            )
        if self.engine == "fsdp2" and workload.kind == "image":
            raise Refused(
                "Accelerate's FSDP2 asks the model for its token embeddings, which image models do"
                " not have; use fsdp2"
            )
        if self.zero:
            if importlib.util.find_spec("deepspeed") is None:
                raise Unavailable(
                    f"package deepspeed is not installed: {how_to_install('deepspeed')}"
                )
            self.zero.check(cell, workload)

    def tolerance(self, cell: Cell, workload: Workload) -> Tolerance:
        if self.zero:
            return self.zero.tolerance(cell, workload)
        return WHOLLY if self.engine == "fsdp2" and cell.precision != "fp32" else EXACT

    def reference(self, cell: Cell) -> Cell:
        if self.zero:
            return self.zero.reference(cell)
        wholly = self.engine == "fsdp2" and cell.precision != "fp32"
        return half_throughout(cell, self.layout(cell.devices)) if wholly else cell.reference()

    def stand_in(self, cell: Cell) -> str | None:
        if self.engine != "fsdp2" or cell.device != "cpu":
            return None
        return (
            "Accelerate has FSDP2 on GPUs only; it is told that the CPU is one, and communicates"
            " over gloo"
        )

    def fsdp2_settings(self, cell: Cell) -> dict[str, object] | None:
        if self.engine != "fsdp2":
            return None
        return fsdp2_settings(make_workload(cell.workload)) | state_dict_type(cell)

    def deepspeed_config(self, cell: Cell) -> dict[str, object] | None:
        if not self.zero:
            return None
        sizes = model_facts(make_workload(cell.workload)).sizes
        return self.zero.config(cell, self.layout(cell.devices), sizes)

    @property
    def shards_parameters(self) -> bool:
        return self.engine in ("zero3", "fsdp2")

    @property
    def zero_stage(self) -> int:
        zero = self.zero
        return zero.stage if zero else super().zero_stage

    @property
    def accumulates_whole_gradients(self) -> bool:
        return self.engine == "fsdp2"

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States | None:
        if zero := self.zero:
            return zero.states(cell, layout, facts)
        if self.engine == "ddp":
            wrapped = cell.device == "cpu" or cell.devices > 1
            return whole_model_states(cell, facts) if wrapped else model_states(cell, facts)
        return fsdp2_states(cell, facts, cell.devices)

    def traffic(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float | None:
        zero = self.zero
        return zero.traffic(cell, layout, facts) if zero else None


def recompute_by_transformers(
    model: nn.Module, blocks: Sequence[nn.Module], recompute: str
) -> None:
    whole: Any = model
    whole.activation_checkpointing_enable(checkpoint_arguments(recompute))


def recompute_elsewhere(model: nn.Module, blocks: Sequence[nn.Module], recompute: str) -> None:
    """Does nothing: the caller or its library enables recomputation later."""


def fsdp2_states(cell: Cell, facts: ModelFacts, shards: int) -> States:
    """Returns states of Accelerate's FSDP2, which gathers parameters, accumulates unreduced
    gradients and reduces them in the cell's precision."""
    states, half = model_states(cell, facts, shards), cell.precision != "fp32"
    gradients = states.transient
    unreduced = float(2 * sum(facts.sizes) if half else facts.trained_bytes)
    if cell.micro_batches > 1:
        gradients = unreduced
    transient = fsdp_transient(cell, facts, gradients, half=half, copied=unreduced)
    return dataclasses.replace(states, transient=transient)


def make_accelerator(
    job: Job,
    fsdp2: Mapping[str, object] | None,
    deepspeed: Mapping[str, object] | None,
    launched: bool,
    parallelism: ParallelismConfig | None = None,
) -> Accelerator:
    """Builds an Accelerator for FSDP2, DeepSpeed or, if neither is given, DDP. `launched`:
    `accelerate launch` has put the settings into the environment."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import (
        DataLoaderConfiguration,
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
    # DeepSpeed picks its device itself and is disabled by `cpu=True`.
    made = Accelerator(
        cpu=cpu and not deepspeed,
        gradient_accumulation_steps=job.cell.micro_batches,
        # Otherwise a prepared scheduler steps once per process and update.
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        kwargs_handlers=handlers,
        **given,
    )
    # Accelerate uses all cores if OMP_NUM_THREADS is not set.
    torch.set_num_threads(job.threads)
    return made


class AccelerateState:
    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator, self.step = accelerator, 0
        accelerator.register_for_checkpointing(self)

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.step = state_dict["step"]

    def save(self, folder: Path, step: int) -> None:
        self.step = step
        self.accelerator.save_state(str(folder))

    def load(self, folder: Path) -> int:
        self.accelerator.load_state(str(folder))
        return self.step


def pretend_gpus() -> None:
    """Pretends to be on GPUs, which Accelerate's FSDP and ParallelismConfig require."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU


def verify(job: Job, accelerator: Accelerator, fsdp2: bool, deepspeed: bool) -> None:
    """Raises RuntimeError unless Accelerate's engine, precision, ranks and threads fit the cell."""
    import torch
    from accelerate.utils import DistributedType

    on_cpus = job.device.type == "cpu" and job.layout.tensor == 1
    plain = DistributedType.MULTI_CPU if on_cpus else DistributedType.MULTI_GPU
    wanted = DistributedType.FSDP if fsdp2 else DistributedType.DEEPSPEED if deepspeed else plain
    if accelerator.num_processes != job.cell.devices:
        raise RuntimeError(
            f"Accelerate sees only {accelerator.num_processes} of {job.cell.devices} processes,"
            " so it would not average gradients"
        )
    if accelerator.distributed_type != wanted:
        raise RuntimeError(
            f"Accelerate would train with {accelerator.distributed_type} instead of {wanted}"
        )
    if accelerator.mixed_precision != mixed_precision(job.cell):
        raise RuntimeError(
            f"Accelerate would train in mixed precision {accelerator.mixed_precision} instead of"
            f" {job.cell.precision}"
        )
    if torch.get_num_threads() != job.threads:
        raise RuntimeError(
            f"Accelerate uses {torch.get_num_threads()} threads per rank instead of {job.threads}"
        )


def prepare_scheduler(
    job: Job, accelerator: Accelerator, optimizer: Optimizer
) -> AcceleratedScheduler | None:
    """Returns Accelerate's wrapper of the cell's scheduler; None for a constant learning rate."""
    scheduler = job.scheduler(optimizer)
    return None if scheduler is None else accelerator.prepare_scheduler(scheduler)


def train_step(
    job: Job,
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: AcceleratedScheduler | None,
) -> TrainStep:
    import torch

    plain, parts, max_norm = own_precision(job), job.cell.micro_batches, job.cell.clip_norm

    def step(batch: Batch) -> Tensor:
        total = torch.zeros((), device=job.device)
        for part in batch.split(parts):
            with accelerator.accumulate(model):
                loss = plain.loss(model, part)
                # Divides the loss by the number of micro-batches; with DeepSpeed, also updates.
                accelerator.backward(loss)
                if max_norm is not None and accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), max_norm)
                    job.recipe.gradient_norm = whole(norm)
                optimizer.step()  # no-op before the last micro-batch, like scheduler.step()
                if scheduler is not None:
                    scheduler.step()
                optimizer.zero_grad()
            total += loss.detach() / parts
        return total

    return step
