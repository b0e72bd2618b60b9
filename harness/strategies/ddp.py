from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from harness.cell.errors import Refused, Unavailable
from harness.cell.training import (
    EMULATED,
    EXACT,
    Layout,
    Retained,
    States,
    Tolerance,
    TrainStep,
    first_replayed,
)
from harness.seam import Capabilities, Cell, Export, Job, ModelFacts, Strategy
from harness.seam.formulas import all_reduced, in_half, passed_once, whole_model_states
from harness.seam.job import standard_step
from harness.seam.registry import POWER_SGD
from harness.strategies._accelerate_config import accelerate_export
from harness.strategies._power_sgd import FIRST_COMPRESSED, POWER_SGD_RANK
from harness.workloads import Workload, make_workload
from harness.workloads.counts import model_facts

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
    from torch.nn.parallel import DistributedDataParallel


DEFAULT_BUCKETS_MIB = 1, 25
COMPRESSED = {
    "fp16": Tolerance(1e-4, 0.03, "gradients travel in fp16"),
    "bf16": Tolerance(1e-3, 0.2, "gradients travel in bf16"),
    "powersgd": EMULATED,
}


class Ddp(Strategy):
    """DistributedDataParallel: whole model on each rank, gradients all-reduced during backward."""

    capabilities = Capabilities(
        compiles=("block", "block_cudagraphs"),
        extra_optimizers=("adamw_8bit", "muon"),
        skips_parameters=True,
        fused_loss=True,
    )

    bucket_cap_mb: float | None = Field(default=None, ge=0.001)
    """Size of every gradient bucket in MiB; by default 1 for the first and 25 for the others."""
    static_graph: bool = False
    """Promise that every step uses the same parameters."""
    gradient_as_bucket_view: bool = False
    """Store gradients as views of the buckets instead of copying them."""
    comm_hook: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    """Compression of gradients during communication."""

    def check(self, cell: Cell, workload: Workload) -> None:
        if self.comm_hook == "bf16" and cell.device == "cpu":
            raise Unavailable("the bf16 compression hook runs only on NCCL; use GPUs")
        if self.comm_hook == "powersgd":
            check_power_sgd(cell, workload)
        least = least_bucket_mib(self.comm_hook, cell, workload)
        if self.bucket_cap_mb is not None and self.bucket_cap_mb < least:
            raise Refused(
                f"PowerSGD aborts on gloo with several buckets: give bucket_cap_mb {least} or more,"
                " or leave it out"
            )

    def tolerance(self, cell: Cell, workload: Workload) -> Tolerance:
        return COMPRESSED.get(self.comm_hook, EXACT)

    def reference(self, cell: Cell) -> Cell:
        if self.comm_hook != "powersgd":
            return cell.reference()
        mib = self.bucket_cap_mb or least_bucket_mib("powersgd", cell, make_workload(cell.workload))
        first, later = (mib, mib) if mib else DEFAULT_BUCKETS_MIB
        options = {
            "ranks": cell.devices,
            "first_bucket_bytes": int(first * 2**20),
            "bucket_bytes": int(later * 2**20),
        }
        reference = cell.reference(POWER_SGD, options)
        return reference.model_copy(update={"micro_batches": cell.devices})

    def rewind_skipped_reason(self, cell: Cell) -> str:
        early = first_replayed(cell.parity_steps) <= FIRST_COMPRESSED
        return "PowerSGD's errors begin too late" if early and self.comm_hook == "powersgd" else ""

    @property
    def settling_steps(self) -> int:
        return FIRST_COMPRESSED + 1 if self.comm_hook == "powersgd" else 1

    def ddp_equivalent_of(self, cell: Cell) -> str | None:
        names = {"elastic": "torchrun", "spawn": "torch.multiprocessing.spawn"}
        return None if self.model_fields_set else names[cell.launcher]

    def export(self, cell: Cell, to: str) -> Export | None:
        least = least_bucket_mib(self.comm_hook, cell, make_workload(cell.workload))
        bucket = {"bucket_cap_mb": self.bucket_cap_mb or least or None}
        if to == "accelerate":
            return accelerate_export(cell, ddp=self.model_dump() | bucket)
        saves = {"saves": self.comm_hook != "powersgd"}
        return Export("ddp.py.j2", bucket | saves) if to in ("torchrun", "slurm") else None

    def setup(self, job: Job) -> TrainStep:
        least = least_bucket_mib(self.comm_hook, job.cell, job.workload)
        model = wrap_in_ddp(
            job,
            job.model(),
            bucket_cap_mb=self.bucket_cap_mb or least or None,
            static_graph=self.static_graph,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
        )
        state = None if self.comm_hook == "none" else compress(model, self.comm_hook)
        optimizer = job.optimizer_of(model)
        job.register(model, optimizer).library = lambda: [
            *ddp_buckets(model),
            *power_sgd_memory(state),
        ]
        return standard_step(job, model, optimizer, no_sync=model.no_sync)

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States:
        whole = whole_model_states(cell, facts)
        if self.comm_hook == "powersgd":
            reduced_bytes = facts.trained_bytes + factor_bytes(make_workload(cell.workload))
            whole = dataclasses.replace(whole, library=whole.library + reduced_bytes)
        # Without exchange, backward allocates gradients of its own (`no_sync`).
        views = self.gradient_as_bucket_view and cell.micro_batches == 1
        return dataclasses.replace(whole, transient=0.0) if views else whole

    def traffic(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float | None:
        """Adds rank 0's broadcast of buffers; None for PowerSGD."""
        if self.comm_hook == "powersgd":
            return None
        sent = facts.trained_bytes if self.comm_hook == "none" else in_half(facts)
        return all_reduced(layout.data, sent) + passed_once(
            layout.data, facts.buffer_bytes - facts.scale_bytes
        )


def wrap_in_ddp(
    job: Job,
    model: nn.Module,
    *,
    bucket_cap_mb: float | None = None,
    static_graph: bool = False,
    gradient_as_bucket_view: bool = False,
) -> DistributedDataParallel:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(
        model,
        device_ids=[job.device] if job.device.type == "cuda" else None,
        bucket_cap_mb=bucket_cap_mb,
        static_graph=static_graph or bool(job.workload.repeated),
        find_unused_parameters=bool(job.workload.skipped),
        gradient_as_bucket_view=gradient_as_bucket_view,
    )


def ddp_buckets(model: nn.Module) -> Iterator[Retained]:
    """Yields DDP's gradient buckets, which expose only their sizes.

    Yields nothing for an unwrapped model.
    """
    from torch.nn.parallel import DistributedDataParallel

    if not isinstance(model, DistributedDataParallel):
        return
    data = model._get_ddp_logging_data()
    # Rebuilt sizes appear one step after the rebuild.
    sizes = data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]
    views = (
        sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        if model.gradient_as_bucket_view
        else 0
    )
    total = sum(int(size) for size in sizes.split(","))
    yield "library", "gradient buckets of DDP's reducer", total - views


def check_power_sgd(cell: Cell, workload: Workload) -> None:
    """Raises Refused for half-precision gradients, and for checkpoints."""
    if workload.arithmetic:
        raise Refused(
            f"PowerSGD's reference compresses fp32 gradients, but those of {workload.name} are"
            f" {workload.arithmetic}: use {workload.in_fp32}, or another comm_hook"
        )
    if cell.checkpoint != "none":
        raise Refused(
            "PowerSGD's error feedback is not saved in checkpoints: use another comm_hook, or"
            " checkpoint none"
        )


def least_bucket_mib(hook: str, cell: Cell, workload: Workload) -> int:
    """Returns the minimum bucket size in MiB under this hook; 0 if any size will do.

    PowerSGD reduces buckets in an order that differs between ranks. If there are several, gloo
    pairs the wrong buckets and aborts, so on CPUs one bucket must hold all gradients.
    """
    if hook != "powersgd" or cell.device != "cpu":
        return 0
    return -(-model_facts(workload).trained_bytes // 2**20)


def factor_bytes(workload: Workload) -> int:
    """Returns bytes of PowerSGD's rank-4 factors, for matrices that they make less than half as
    large (`_should_compress` in torch's powerSGD_hook.py)."""
    bytes_kept = 0
    for parameter in workload.on_meta().parameters():
        rows, columns = parameter.shape[0], parameter[0].numel()
        elements = (rows + columns) * min(rows, columns, POWER_SGD_RANK)
        if parameter.requires_grad and 2 * elements < parameter.numel():
            bytes_kept += elements * parameter.element_size()
    return bytes_kept


def power_sgd_memory(state: PowerSGDState | None) -> Iterator[Retained]:
    """Yields what PowerSGD keeps between steps: errors and factors by bucket."""
    if state is None:
        return
    for name in ("error_dict", "p_memory_dict", "q_memory_dict"):
        for bucket, tensor in getattr(state, name).items():
            yield "library", f"PowerSGD's {name}, bucket {bucket}", tensor


def compress(model: DistributedDataParallel, hook: str) -> PowerSGDState | None:
    """Registers a hook that compresses gradients; returns PowerSGD's state."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=POWER_SGD_RANK, start_powerSGD_iter=FIRST_COMPRESSED
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return state
    hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
    model.register_comm_hook(None, hooks[hook])
    return None
