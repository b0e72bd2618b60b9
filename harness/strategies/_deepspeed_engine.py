from __future__ import annotations

import functools
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.cell.training import EXACT, Batch, Retained, Tolerance, TrainStep
from harness.seam import Job
from harness.seam.checkpoints import MOMENTS, moments_of, random_states
from harness.seam.job import Moment, Wait, own_precision
from harness.seam.optimizers import for_muon

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from deepspeed.runtime import ZeROOptimizer
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

    from harness.workloads.workload import HasLogits

MUON = Tolerance(
    EXACT.loss,
    0.03,
    "DeepSpeed's Newton-Schulz iteration rounds to bf16 at other places than torch's",
    minimum_by_noise=0.1,
    other_kinds=0.05,
)
CHECKPOINT = "checkpoint"


def emptied_folder(job: Job, chosen: str) -> Path:
    """Returns the chosen offload folder, or the trial's own, without earlier trials' files."""
    import torch.distributed as dist

    folder = Path(chosen) / "parallelism-bench-offload" if chosen else job.scratch / "offload"
    if chosen and job.rank % job.local_processes == 0:
        shutil.rmtree(folder, ignore_errors=True)
    if chosen:
        dist.barrier()
    return folder


def zero_optimizer(job: Job, model: nn.Module, offloaded: bool) -> Optimizer:
    """Returns torch's optimizer, DeepSpeed's Muon, which knows ZeRO's shards, or its CPU AdamW for
    offloaded states."""
    if job.cell.optimizer == "muon":
        return _muon(job, model)
    if not offloaded:
        return job.optimizer(model.parameters())
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    _, kwargs = job.optimizer_class()
    groups = job.parameter_groups(model.parameters())
    optimizer: Optimizer = DeepSpeedCPUAdam(groups, adamw_mode=True, **kwargs)
    return optimizer


def _muon(job: Job, model: nn.Module) -> Optimizer:
    """Returns DeepSpeed's Muon with AdamW for the other parameters.

    ZeRO gathers a matrix's gradient and orthogonalises it before the step. DeepSpeed scales steps
    by sqrt(max(1, rows / columns)). With a rate of 0.2 sqrt(columns) for each number of columns,
    they are torch's `match_rms_adamw`: 0.2 sqrt(max(rows, columns)). Weight decay is per rate.
    """
    import torch
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    if job.device.type == "cpu":
        # DeepSpeed compiles its updates, which takes a minute on CPUs.
        torch.compiler.set_stance("force_eager")
    matrices, others = for_muon(job.cell, model)
    kind, kwargs = job.optimizer_class()
    groups: list[dict[str, Any]] = []
    for columns in sorted({matrix.shape[1] for matrix in matrices}):
        scale = 0.2 * math.sqrt(columns)
        rates = {
            "lr": scale * job.cell.learning_rate,
            "weight_decay": job.cell.weight_decay / scale,
        }
        same = [matrix for matrix in matrices if matrix.shape[1] == columns]
        groups.append({"params": same, "use_muon": True, "ns_method": "standard", **rates})
    groups += ({**kwargs, **part, "use_muon": False} for part in job.groups(others))
    for group in groups:
        for parameter in group["params"]:
            parameter.use_muon = group["use_muon"]
    optimizer: Optimizer = MuonWithAuxAdam(groups, adam_optimizer=kind)
    return optimizer


def undo_first_step(engine: DeepSpeedEngine) -> None:
    """Undoes the initial step with zero gradients that DeepSpeed takes without ZeRO in half
    precision. It decays weights and counts in bias corrections."""
    if hasattr(engine.optimizer, "refresh_fp32_params"):
        engine.basic_optimizer.state.clear()
        engine.optimizer.refresh_fp32_params()


def engine_step(
    job: Job,
    engine: DeepSpeedEngine,
    model: Callable[[Tensor], Tensor | HasLogits] | None = None,
    divisor: int = 1,
) -> TrainStep:
    """Returns a step of DeepSpeed's loop, whose engine accumulates gradients. `model`: callable
    that runs the engine (default: `engine`). `divisor`: number that the loss is divided by."""
    import torch

    plain, parts = own_precision(job), job.cell.micro_batches
    keep_norm(engine)

    def step(batch: Batch) -> Tensor:
        total = torch.zeros((), device=job.device)
        for part in batch.split(parts):
            loss = plain.loss(model or engine, part)
            engine.backward(loss / divisor if divisor > 1 else loss)
            engine.step()
            total += loss.detach() / parts
        if job.cell.clip_norm is not None:
            job.recipe.gradient_norm = engine.get_global_grad_norm()
        return total

    return step


def keep_norm(engine: DeepSpeedEngine) -> None:
    """Makes `get_global_grad_norm` work in fp32 without ZeRO too.

    DeepSpeed 0.19.8 clips to the norm but does not keep it.
    """
    from deepspeed.runtime import engine as module

    clip = module.clip_grad_norm_

    def clip_and_keep(*arguments: object, **named: object) -> Tensor:
        norm: Tensor = clip(*arguments, **named)
        engine._global_grad_norm = norm
        return norm

    module.clip_grad_norm_ = clip_and_keep


def save_by_engine(job: Job, engine: DeepSpeedEngine) -> None:
    job.save_by(
        functools.partial(_save_checkpoint, engine),
        functools.partial(_load_checkpoint, job, engine),
    )


def _save_checkpoint(engine: DeepSpeedEngine, folder: Path, step: int) -> None:
    client_state = {"step": step, "random": random_states()}
    engine.save_checkpoint(str(folder), CHECKPOINT, client_state=client_state)


def _load_checkpoint(job: Job, engine: DeepSpeedEngine, folder: Path) -> int:
    """Loads a checkpoint and returns its step. Raises RuntimeError if there is none; DeepSpeed only
    warns."""
    import torch

    path, client_state = engine.load_checkpoint(str(folder), CHECKPOINT)
    if path is None:
        raise RuntimeError("DeepSpeed has not loaded the checkpoint")
    torch.set_rng_state(client_state["random"][job.rank])
    step: int = client_state["step"]
    return step


def retained_by_engine(engine: DeepSpeedEngine) -> Iterator[Retained]:
    """Yields what engine and optimizer retain, a storage's owner before its views."""
    for name, buffer in engine.module.named_buffers():
        yield "library", f"model buffer {name}", buffer
    zero = engine.optimizer
    if hasattr(zero, "parameter_offload"):
        yield from _stage_3(engine, zero)
    elif hasattr(zero, "bit16_groups_flat"):
        yield from _stages_1_and_2(zero)
    for name, parameter in engine.module.named_parameters():
        # Partitions were yielded above; a whole parameter that has one is a copy.
        yield (
            ("library", "persistent parameters", parameter)
            if hasattr(parameter, "ds_tensor")
            else ("parameters", name, parameter)
        )
        if parameter.grad is not None:
            yield "gradients", name, parameter.grad
    for state in engine.basic_optimizer.state.values():
        yield from (
            ("optimizer", str(key), value)
            for key, value in state.items()
            if hasattr(value, "untyped_storage")
        )
    for group in getattr(zero, "fp32_groups", ()):
        yield from (("library", "fp32 master weights", master) for master in group)


def engine_waits(engine: DeepSpeedEngine) -> list[Wait]:
    zero = engine.optimizer
    named: list[Wait] = [(zero, "step", "optimizer")]
    swapper = next(
        (
            p.nvme_swapper
            for p in engine.module.parameters()
            if getattr(p, "nvme_swapper", None) is not None
        ),
        None,
    )
    if swapper:
        named += [
            (swapper, name, "offload")
            for name in (
                "synchronize_reads",
                "synchronize_writes",
                "swap_out_and_release",
                "swap_in",
            )
        ]
    if states := getattr(zero, "optimizer_swapper", None):
        named += [
            (states, name, "offload")
            for name in (
                "swap_in_optimizer_state",
                "swap_out_optimizer_state",
                "swap_out_gradients",
            )
        ]
    return named


def _masters(masters: Sequence[Tensor]) -> Iterator[Retained]:
    for master in masters:
        yield "library", "fp32 master partition", master
        if master.grad is not None:
            yield "gradients", "fp32 gradient partition", master.grad


def _stages_1_and_2(zero: ZeROOptimizer) -> Iterator[Retained]:
    for flat in zero.bit16_groups_flat:
        yield "parameters", "flat parameters", flat
    yield from _masters(zero.single_partition_of_fp32_groups)
    for bucket in zero.ipg_buckets.values():
        yield from (("library", "reduction bucket", buffer) for buffer in bucket.buffer)
    for gradients in (*zero.averaged_gradients.values(), *zero.all_grad_tensors.values()):
        yield from (("gradients", "averaged gradients", gradient) for gradient in gradients or ())
    if zero.cpu_offload:
        for copy in zero.param_buffer_of_bit16_for_cpu_offload_groups:
            yield "library", "parameter partition on its way back", copy
        yield "library", "gradient on its way out (host)", zero.temp_grad_buffer_for_cpu_offload
        yield "library", "gradient on its way out (device)", zero.temp_grad_buffer_for_gpu_offload
        yield from (
            ("gradients", "accumulated gradients", gradient)
            for gradient in zero.accumulated_grads_in_cpu.values()
        )


def _stage_3(engine: DeepSpeedEngine, zero: ZeROOptimizer) -> Iterator[Retained]:
    for flat in (*zero.fp16_partitioned_groups_flat, *zero.param_groups_fp16_flat_cpu_memory):
        if flat is not None:
            yield "parameters", "flat parameter partitions", flat
    swapper = next(
        (p.nvme_swapper for p in engine.module.parameters() if p.nvme_swapper is not None), None
    )
    if swapper:
        yield "library", "swap buffers of parameters", swapper.buffers
        yield "library", "stand-in for parameters on disk", swapper.invalid_buffer
        if swapper.partitioned_swap_buffer is not None:
            yield "library", "swap buffer of updated parameters", swapper.partitioned_swap_buffer
    for parameter in engine.module.parameters():
        yield "parameters", "parameter partition", parameter.ds_tensor
    yield from _masters(zero.fp32_partitioned_groups_flat)
    yield "gradients", "flat gradient partitions", zero.grad_partitions_flat_buffer
    for bucket in zero.ipg_buckets.values():
        yield "library", "reduction bucket", bucket.buffer
    if zero.optimizer_swapper:
        for buffer in zero.optimizer_swapper.swap_buffer_manager.all_buffers:
            yield "library", "swap buffers of the optimizer", buffer


def full_parameters(engine: DeepSpeedEngine) -> Iterator[tuple[str, Tensor]]:
    """Yields whole parameters by name, or their fp32 masters; call on all ranks."""
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    groups = zip(
        getattr(engine.optimizer, "fp16_groups", ()),
        getattr(engine.optimizer, "fp32_groups", ()),
        strict=False,
    )
    masters = {
        half: master
        for halves, wholes in groups
        for half, master in zip(halves, wholes, strict=True)
    }
    for name, parameter in engine.module.named_parameters():
        fp32_parameter = masters.get(parameter, safe_get_full_fp32_param(parameter))
        # Parameters frozen in stage 3 have no master and must be gathered.
        with GatheredParameters(
            [parameter], enabled=fp32_parameter is None and hasattr(parameter, "ds_id")
        ):
            yield name, parameter if fp32_parameter is None else fp32_parameter


def gathered(part: Tensor, group: ProcessGroup, dimension: int = 0) -> Tensor:
    """Returns the equal parts of all ranks of a group, joined along a dimension."""
    import torch
    import torch.distributed as dist

    mine = part.detach().contiguous()
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    return torch.cat(parts, dimension)


def full_moments(engine: DeepSpeedEngine) -> Iterator[Moment]:
    """Yields whole optimizer states by name; call on all ranks.

    DeepSpeed 0.19.8 links parameters with states before all groups have some (stages 1 and 2); they
    are linked again here.
    """
    from deepspeed.utils import safe_get_full_optimizer_state

    named, optimizer = dict(engine.module.named_parameters()), engine.basic_optimizer
    if not engine.zero_optimization():
        yield from moments_of(named.items(), [optimizer])
        return
    if relink := getattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state", None):
        engine.optimizer._hp_optimizer_states_linked = False
        relink()
    kinds = [kind for kind in MOMENTS if any(kind in s for s in optimizer.state.values())]
    if optimizer.__class__.__name__.startswith("Muon"):
        # The momentum of a matrix is whole on every rank that has a part of it.
        kinds.remove("momentum_buffer")
        named = {name: p for name, p in named.items() if not p.use_muon}
    for name, parameter in named.items():
        for kind in kinds if parameter.requires_grad else ():
            whole = safe_get_full_optimizer_state(parameter, kind)
            if whole is not None:
                yield name, kind, whole
