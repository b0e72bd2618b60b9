from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cell.training import EXACT, Layout, States, Tolerance, TrainStep
from harness.seam import Cell, Export, Job, ModelFacts
from harness.seam.formulas import all_reduced, model_states, passed_once
from harness.strategies import _deepspeed_engine as engines
from harness.strategies._accelerate_config import accelerate_export, deepspeed_parts
from harness.strategies._deepspeed import settle
from harness.strategies._deepspeed_zero import SWAPPED_BYTES, ZeroOptions
from harness.strategies._half import WHOLLY, half_throughout
from harness.workloads import Workload, make_workload
from harness.workloads.counts import model_facts

if TYPE_CHECKING:
    from types import ModuleType

    from deepspeed import DeepSpeedEngine
    from torch import Tensor, nn
    from torch.optim import Optimizer


class Deepspeed(ZeroOptions):
    """DeepSpeed ZeRO stages 0 to 3: shard nothing, the optimizer, gradients too, parameters too.

    fp16 and bf16 are DeepSpeed's own: half weights, gradients summed and sent in half, fp32 masters
    of the rounded weights. Only stages 1 to 3 scale the fp16 loss. Offloaded states use its CPU
    Adam: torch's AdamW up to rounding. Muon orthogonalises whole gradients in every stage; with it,
    DeepSpeed 0.19.8 clips the orthogonalised updates, so cells with `clip_norm` are `diverged`.
    """

    capabilities = dataclasses.replace(
        ZeroOptions.capabilities, extra_optimizers=("muon",), fused_loss=True
    )

    def tolerance(self, cell: Cell, workload: Workload) -> Tolerance:
        if cell.optimizer == "muon":
            return engines.MUON
        return EXACT if cell.precision == "fp32" else WHOLLY

    def reference(self, cell: Cell) -> Cell:
        if cell.precision == "fp32":
            return cell.reference()
        return half_throughout(
            cell,
            self.layout(cell.devices),
            rounded_masters=True,
            order="micro_batches" if self.stage >= 2 else "ranks",
        )

    def ddp_equivalent_of(self, cell: Cell) -> str | None:
        plain = self.stage == 0 and self.model_fields_set <= {"stage"}
        return "DeepSpeed stage 0" if plain and cell.precision == "fp32" else None

    def export(self, cell: Cell, to: str) -> Export | None:
        workload, layout = make_workload(cell.workload), self.layout(cell.devices)
        sizes = self.partitioned(workload, model_facts(workload)).sizes
        config = self.config(cell, layout, sizes, self.folder or "offload")
        on_cpu = cell.device == "cpu" and cell.precision == "fp32"
        asked = {
            "cpu_adam": self.offload_optimizer != "none" and cell.optimizer == "adamw",
            "undo_first_step": self.stage == 0 and cell.precision != "fp32",
            "keep_dtype": self.offload_parameters == "nvme" and on_cpu,
        }
        if to == "accelerate":
            return accelerate_export(cell, deepspeed=config, about_deepspeed=asked)
        if to not in ("torchrun", "slurm", "deepspeed"):
            return None
        plain = {"autocast": False, "mpu": "", "called": "engine", "trained_loss": "loss"}
        on_disk = "nvme" in (self.offload_optimizer, self.offload_parameters)
        saved = {"saves": not on_disk, "trained": "engine"}
        values = {**plain, **asked, **saved}
        return Export("deepspeed.py.j2", values, **deepspeed_parts(cell, config))

    def setup(self, job: Job) -> TrainStep:
        settle(job.device.type, job.local_processes)
        import deepspeed

        model = self.build(job)
        folder = engines.emptied_folder(job, self.folder)
        sizes = [p.numel() for p in model.parameters() if p.requires_grad]
        config = self.config(job.cell, job.layout, sizes, folder)
        groups = self.groups(job, model)
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=self.optimizer(job, model),
            config=config,
            mpu=groups,
            lr_scheduler=None if job.cell.schedule == "constant" else job.scheduler,
        )
        if self.stage == 0:
            engines.undo_first_step(engine)
        self.register(job, engine, folder if self.on_disk else None)
        return self.train_step(job, engine)

    def build(self, job: Job) -> nn.Module:
        return job.model()

    def optimizer(self, job: Job, model: nn.Module) -> Optimizer | Callable[..., Optimizer]:
        """Returns the optimizer, or a function that makes it from the engine's parameters."""
        return engines.zero_optimizer(job, model, self.offload_optimizer != "none")

    def groups(self, job: Job, model: nn.Module) -> ModuleType | None:
        """Returns DeepSpeed's `mpu`, which groups the ranks; None if all are data parallel."""
        return None

    def train_step(self, job: Job, engine: DeepSpeedEngine) -> TrainStep:
        return engines.engine_step(job, engine)

    def register(self, job: Job, engine: DeepSpeedEngine, folder: Path | None = None) -> None:
        """Registers an engine, perhaps built by another library."""
        registered = job.register(engine.module, engine.basic_optimizer)
        registered.gather = lambda: self.whole(engine)
        registered.moments = None if folder else lambda: engines.full_moments(engine)
        registered.states = lambda: engines.retained_by_engine(engine)
        registered.waits = engines.engine_waits(engine)
        registered.offload_folder = folder
        engines.save_by_engine(job, engine)

    def whole(self, engine: DeepSpeedEngine) -> Iterator[tuple[str, Tensor]]:
        return engines.full_parameters(engine)

    @property
    def zero_stage(self) -> int:
        return self.stage

    @property
    def shards_parameters(self) -> bool:
        return self.stage == 3

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States | None:
        """Returns the fullest rank's states: ZeRO's (section 3.1) plus what DeepSpeed 0.19.8 adds.
        None for sharded Muon, whose momentum is whole for matrices that only begin on a rank.

        Stages 1 to 3 keep an fp32 master partition even for fp32 parameters (stage 3 fails to share
        it: it compares a device with its name). Stage 3 also keeps the partition's gradients and
        reduction buckets.
        """
        chosen = self
        width, moments = 4 if cell.precision == "fp32" else 2, cell.moments
        whole, ranks, sizes = sum(facts.sizes), layout.replicas, facts.sizes
        buffers = float(facts.buffer_bytes)
        frozen = (facts.parameter_bytes - facts.trained_bytes) * width / 4
        if chosen.stage == 0 and width == 4:
            # Gradients and their flat copy; half weights also have an fp32 copy.
            return dataclasses.replace(model_states(cell, facts), transient=8.0 * whole)
        if chosen.stage == 0:
            parameters, library = width * whole + frozen, buffers + 4 * whole
            return States(parameters, 0, 4 * moments * whole, library, (width + 4) * whole)
        if cell.optimizer == "muon":
            return None
        if chosen.stage == 3:
            states = self._states_3(cell, layout, facts)
            return dataclasses.replace(states, parameters=states.parameters + frozen / ranks)
        part = 2 * -(-whole // (2 * ranks))
        held_until_reduced = whole if chosen.stage == 1 else max(chosen.bucket(sizes), *sizes)
        transient = max(width * (held_until_reduced + part), 12 * part)
        states = States(
            width * part * ranks + frozen, 0, 4 * moments * part, buffers + 4 * part, transient
        )
        if chosen.offload_optimizer == "none":
            return states
        if cell.device == "cuda":  # the partition's gradients and its update are on the host
            library = buffers + width * max(sizes)
            return States(states.parameters, 0, 0, library, width * float(held_until_reduced))
        accumulated = width * part if cell.micro_batches > 1 and chosen.stage == 2 else 0
        return dataclasses.replace(
            states,
            gradients=4 * part + accumulated,
            library=states.library + width * (part + 2 * max(sizes)),
        )

    def _states_3(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States:
        chosen = self
        swapping = chosen.swapping(cell, layout.replicas, facts.sizes)
        width, parts, groups = swapping.width, swapping.parts, swapping.groups
        moments = cell.moments
        bucket = chosen.bucket(facts.sizes)
        live = chosen.live(facts.sizes)
        # Parameters above the bucket's size are gathered, and their gradients reduced, alone.
        reduced, gathered = (bucket + max(bucket, *facts.sizes), live + max(live, *facts.sizes))
        optimizer_leaves = chosen.offload_optimizer != "none" and cell.device == "cuda"
        parameters_leave = chosen.offload_parameters != "none" and cell.device == "cuda"
        swapped_groups = [
            group
            for group in groups
            if chosen.offload_optimizer == "nvme" and 4 * sum(group) >= SWAPPED_BYTES
        ]
        swapped_parts = [
            part
            for part in parts
            if chosen.offload_parameters == "nvme" and width * part >= SWAPPED_BYTES
        ]
        updated = sum(parts) - sum(sum(group) for group in swapped_groups)
        persistent = sum(size for size in facts.sizes if size <= chosen.persistent(facts.sizes))
        library = float(facts.buffer_bytes) + width * (bucket + persistent)
        gradients = width * sum(parts) + (4 * updated if chosen.offload_optimizer != "none" else 0)
        if not optimizer_leaves:
            library += 4 * updated + (swapping.optimizer_buffer_bytes if swapped_groups else 0)
        if not parameters_leave:
            library += swapping.parameter_buffer_bytes
        return States(
            parameters=0.0 if parameters_leave else width * (sum(parts) - sum(swapped_parts)),
            gradients=0.0 if optimizer_leaves else float(gradients),
            optimizer=0.0 if optimizer_leaves else 4 * moments * updated,
            library=library,
            transient=max(
                1.0 * width * (reduced + gathered),
                0.0 if optimizer_leaves else 12.0 * max(sum(group) for group in groups),
            ),
        )

    def traffic(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float | None:
        """Returns bytes of about 3 elements per parameter (paper, stages 1 to 3: 2, 2, 3).

        Stages 1 and 2 all-reduce gradients and gather the updated parameters. Stage 3 gathers
        parameters for forward and for backward, except those reused soon (`_reused`), and
        persistent parameters after the update. None for stage 3 with recomputation, whose gathers
        depend on prefetching.
        """
        chosen = self
        width, ranks = 4 if cell.precision == "fp32" else 2, layout.replicas
        parts = cell.micro_batches
        model_bytes = float(width * sum(facts.sizes))
        if chosen.stage < 3:
            reduced = all_reduced(ranks, model_bytes) * (parts if chosen.stage == 2 else 1)
            return reduced + (passed_once(ranks, model_bytes) if chosen.stage else 0.0)
        if cell.recompute != "none":
            return None
        threshold = chosen.persistent(facts.sizes)
        persistent = float(width * sum(size for size in facts.sizes if size <= threshold))
        reused = width * _reused(facts.sizes, chosen.live(facts.sizes), threshold)
        return passed_once(
            ranks, parts * (model_bytes + 2 * (model_bytes - persistent) - reused) + persistent
        )


def _reused(sizes: Sequence[int], distance: int, threshold: int) -> int:
    """Returns elements that stage 3 keeps for backward, within the reuse distance.

    Persistent parameters (at most `threshold` elements) do not count.
    """
    between, reused = 0, 0
    for size in reversed(sizes):
        if between >= distance:
            break
        reused += size if size > threshold else 0
        between += 2 * size
    return reused
