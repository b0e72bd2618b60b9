from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from harness.cell.errors import Refused, Unavailable
from harness.cell.training import Layout
from harness.seam import Capabilities, Cell, ModelFacts, Strategy
from harness.strategies._deepspeed import (
    check_prebuilt,
    fp16_on_cpu,
    is_in_memory,
    lockable_bytes,
    missing,
    require_disk,
)
from harness.workloads import Workload
from harness.workloads.counts import model_facts

OffloadTarget = Literal["none", "cpu", "nvme"]
SWAPPED_BYTES = 2**20
"""Minimum size in bytes of tensors that DeepSpeed swaps."""
SWAP_ELEMENTS = 2**20
"""Optimizer elements swapped at a time; DeepSpeed's 1e9 would buffer everything."""
SUB_GROUPS, MOST_UPDATED = 8, 10**9
"""Number of sub-groups in which stage 3 updates a large model, and DeepSpeed's default number of
elements in a sub-group."""
MOST_LIVE, MOST_PREFETCHED = 10**9, 5 * 10**7
"""DeepSpeed's default limits, in elements, of what stage 3 gathers and prefetches."""
SWAP_BUFFERS = 5
ALIGNED_BYTES = 1024
LARGEST_BUCKET = 25 * 2**20 // 4
"""Number of elements of DDP's 25 MiB bucket; DeepSpeed's 5e8 allocates 2 GB for any model."""
PERSISTENT_ELEMENTS, MOST_PERSISTENT, PERSISTENT_SHARE = 1000, 10**5, 10**-4
"""Size in elements up to which every rank keeps a parameter whole (norms and biases): minimum,
maximum, and share of the model. DeepSpeed's 1e5 is nearly all of a model of hidden size 256."""
LOSS_SCALE_POWER = 12
"""Exponent of the initial loss scale (`job.LOSS_SCALE`). DeepSpeed's 2^16 overflows and skips the
first steps."""


@dataclass(frozen=True)
class Swapping:
    sizes: Sequence[int]
    """Number of elements of each trained parameter, unsharded."""
    ranks: int
    width: int
    optimizer: OffloadTarget
    parameters: OffloadTarget

    @property
    def parts(self) -> list[int]:
        return [-(-size // self.ranks) for size in self.sizes]

    @property
    def group_elements(self) -> int:
        """Elements at which a sub-group is closed (`sub_group_size`)."""
        if "nvme" in (self.optimizer, self.parameters):
            return SWAP_ELEMENTS
        return max(SWAP_ELEMENTS, min(MOST_UPDATED, sum(self.parts) // SUB_GROUPS))

    @property
    def groups(self) -> list[list[int]]:
        """Parts in consecutive sub-groups, each of which is updated as a whole."""
        groups: list[list[int]] = [[]]
        for part in self.parts:
            if sum(groups[-1]) >= self.group_elements:
                groups.append([])
            groups[-1].append(part)
        return groups

    @property
    def optimizer_buffer_bytes(self) -> int:
        """Bytes of the optimizer's swap buffers: four of the largest sub-group, or 0."""
        if self.optimizer != "nvme":
            return 0
        return 4 * 4 * _aligned(max(sum(group) for group in self.groups), 4)

    @property
    def parameter_buffer_bytes(self) -> int:
        """Bytes of swap buffers for whole parameters and a sub-group's updates, or 0."""
        if self.parameters != "nvme":
            return 0
        buffers = SWAP_BUFFERS * _aligned(largest_part(self.sizes, self.ranks), self.width)
        updated = sum(_aligned(size, self.width) for size in self._largest_group())
        return self.width * (buffers + updated)

    def _largest_group(self) -> Sequence[int]:
        groups = self.groups
        largest = max(range(len(groups)), key=lambda i: sum(groups[i]))
        before = sum(len(group) for group in groups[:largest])
        return self.sizes[before : before + len(groups[largest])]


def largest_part(sizes: Sequence[int], ranks: int) -> int:
    """Returns elements of a rank's largest part; a generous bound without `sizes`."""
    return max((-(-size // ranks) for size in sizes), default=10**8)


def _aligned(elements: int, width: int) -> int:
    step = ALIGNED_BYTES // width
    return -(-elements // step) * step


def _compiled_parts() -> dict[str, str]:
    return {f"DeepSpeed's {part}": missing(part) or "built" for part in ("cpu_adam", "async_io")}


class ZeroOptions(Strategy):
    """Options shared by DeepSpeed strategies."""

    requires = ("deepspeed",)
    capabilities = Capabilities(
        preload=("deepspeed.runtime.zero.muon.muon_optimizer", "cpuinfo"),
        compiled_parts=_compiled_parts,
        checkpoints=("sharded",),
        reshards=False,
    )

    stage: Literal[0, 1, 2, 3] = 0
    """ZeRO stage."""
    offload_optimizer: OffloadTarget = "none"
    """Keep and update optimizer state on the device, on the host (stages 1 to 3), or in a folder
    (stage 3)."""
    offload_parameters: OffloadTarget = "none"
    """Keep partitioned parameters on the device, on the host, or in a folder, until their layer
    runs (stage 3)."""
    folder: str = ""
    """Folder for `nvme`; empty for the trial's own. Outside the temporary folder, allow it in
    $PARALLELISM_BENCH_DISKS. Its `parallelism-bench-offload` stays until the next trial."""
    bucket_elements: int | None = Field(default=None, gt=0)
    """Elements reduced, prefetched and kept gathered at a time; by default an eighth of the model,
    but at most 6.5M per reduction (25 MiB in fp32)."""
    persistent_elements: int = Field(default=PERSISTENT_ELEMENTS, ge=0)
    """Size in elements up to which stage 3 keeps parameters whole on every rank. The default grows
    with the model: a ten-thousandth of its elements, up to 1e5."""

    @property
    def on_disk(self) -> bool:
        return "nvme" in (self.offload_optimizer, self.offload_parameters)

    def rewind_skipped_reason(self, cell: Cell) -> str:
        return "states are on a disk" if self.on_disk else super().rewind_skipped_reason(cell)

    def check(self, cell: Cell, workload: Workload) -> None:
        require_disk(self.folder)
        if cell.precision == "fp16" and self.stage == 0:
            raise Refused(
                "without ZeRO, DeepSpeed divides fp16 gradients by a loss scale that it never"
                " applied; use stage 1, 2 or 3, or bf16"
            )
        if cell.precision == "fp16" and cell.device == "cpu" and not fp16_on_cpu():
            raise Unavailable(
                "DeepSpeed has no fp16 on this CPU: use one with AVX512-FP16 or AMX-FP16, a GPU, or"
                " bf16"
            )
        if cell.optimizer == "muon" and cell.precision != "fp32":
            raise Refused(
                "the reference of DeepSpeed's half precision has no master weights by name, which"
                " Muon needs: use precision fp32, or optimizer adamw"
            )
        if self.stage > 0 and workload.arithmetic and not workload.partly_frozen:
            raise Refused(
                f"DeepSpeed's stages 1 to 3 update fp32 masters, and {workload.name} has none: use"
                f" {workload.in_fp32} with precision {workload.arithmetic}"
            )
        if workload.double:
            raise Refused(
                f"DeepSpeed trains in fp32 or half precision, and {workload.double} is in fp64;"
                " build the model in fp32, or use ddp"
            )
        if self.stage > 1 and workload.repeated:
            raise Refused(
                f"DeepSpeed reduces the gradient of {workload.repeated[0]} before all its parts are"
                " there, as the module runs several times in reentrant checkpoints: use"
                " use_reentrant=False, stage 1, or ddp"
            )
        if cell.precision != "fp32" and workload.kind in ("image", "speech"):
            raise Refused(
                "DeepSpeed keeps images, spectra and BatchNorm's statistics in fp32 but weights in"
                " half precision, and torch does not mix them; use amp"
            )
        if cell.recompute == "selective" and self.stage == 3:
            raise Refused(
                "DeepSpeed's stage 3 gathers parameters at different operators when a block is"
                " recomputed, so torch's selective checkpoint fails; use recompute full, or stage 2"
            )
        self._check_offload(cell, workload)
        self._check_unused(cell)

    def _check_unused(self, cell: Cell) -> None:
        """Raises Refused for options without effect, which would repeat another cell's training."""
        unused = {
            "bucket_elements": ("stage 1, 2 or 3", self.stage == 0),
            "persistent_elements": ("stage 3", self.stage < 3),
            "folder": ("offload_optimizer or offload_parameters nvme", not self.on_disk),
        }
        for name, (needed, without_effect) in unused.items():
            if name in cell.options and without_effect:
                raise Refused(f"{name} has no effect without {needed}: leave {name} out")

    def _check_offload(self, cell: Cell, workload: Workload) -> None:
        optimizer, on_cpu = self.offload_optimizer, self.offload_optimizer != "none"
        if on_cpu and self.stage == 0:
            raise Refused("stage 0 offloads nothing; use stage 1, 2 or 3")
        if self.stage < 3 and (self.offload_parameters != "none" or optimizer == "nvme"):
            raise Refused(
                "DeepSpeed offloads parameters, or anything to disk, in stage 3 only; use stage 3,"
                f" not {self.stage}"
            )
        if on_cpu and cell.optimizer != "adamw":
            raise Refused(
                "offloaded states are updated by DeepSpeed's own AdamW; use optimizer adamw, not"
                f" {cell.optimizer}"
            )
        sizes = self.partitioned(workload, model_facts(workload)).sizes
        if self.on_disk:
            self._check_swapped(cell, workload, sizes)
        check_prebuilt(*["cpu_adam"] * on_cpu, *["async_io"] * self.on_disk)
        folder = self.folder or tempfile.gettempdir()
        if self.on_disk and is_in_memory(folder):
            raise Unavailable(
                f"{folder} is in memory (tmpfs), so offloading would free nothing; set option"
                " folder to a folder on a disk"
            )
        require_locked(self.swapping(cell, cell.devices, sizes))

    def partitioned(self, workload: Workload, facts: ModelFacts) -> ModelFacts:
        """Returns facts with the trained parameters that DeepSpeed partitions."""
        return facts

    def _check_swapped(self, cell: Cell, workload: Workload, sizes: Sequence[int]) -> None:
        largest: dict[str, float] = {}
        if self.offload_optimizer == "nvme":
            largest["optimizer state"] = 4 * sum(sizes) / cell.devices
        if self.offload_parameters == "nvme":
            width = 4 if cell.precision == "fp32" else 2
            largest["parameter"] = width * max(sizes) / cell.devices
        for what, size in largest.items():
            if size < SWAPPED_BYTES:
                raise Refused(
                    f"the largest {what} of {workload.name} has {size / 2**20:.2g} MiB on each of"
                    f" {cell.devices} ranks, but DeepSpeed keeps everything below 1 MiB in memory;"
                    " use a larger model or fewer devices"
                )

    def stand_in(self, cell: Cell) -> str | None:
        places = {"optimizer states": self.offload_optimizer, "parameters": self.offload_parameters}
        moved = " and ".join(what for what, device in places.items() if device == "cpu")
        if not moved or cell.device != "cpu":
            return None
        return f"nothing to offload: {moved} are already in host memory"

    def swapping(self, cell: Cell, ranks: int, sizes: Sequence[int]) -> Swapping:
        places = self.offload_optimizer, self.offload_parameters
        return Swapping(sizes, ranks, 4 if cell.precision == "fp32" else 2, *places)

    def bucket(self, sizes: Sequence[int]) -> int:
        return self.bucket_elements or min(LARGEST_BUCKET, sum(sizes) // 8) or LARGEST_BUCKET

    def live(self, sizes: Sequence[int]) -> int:
        """Returns the maximum number of elements that stage 3 keeps gathered. Nothing is prefetched
        while a layer exceeds it. Each parameter from a disk takes a swap buffer."""
        bucket = self.bucket(sizes)
        if self.offload_parameters == "nvme" and not self.bucket_elements:
            never_swapped = self.persistent(sizes)
            swapped = sorted(size for size in sizes if size > never_swapped)
            return min(bucket, sum(swapped[: SWAP_BUFFERS - 1]) or bucket)
        most = 0 if self.bucket_elements else MOST_LIVE
        return max(bucket, min(most, sum(sizes) // 8))

    def prefetched(self, sizes: Sequence[int]) -> int:
        return min(self.live(sizes), MOST_PREFETCHED)

    def persistent(self, sizes: Sequence[int]) -> int:
        """Returns the size in elements up to which stage 3 keeps parameters whole."""
        if self.persistent_elements != PERSISTENT_ELEMENTS:
            return self.persistent_elements
        share = int(PERSISTENT_SHARE * sum(sizes))
        return min(MOST_PERSISTENT, max(PERSISTENT_ELEMENTS, share))

    def config(
        self, cell: Cell, layout: Layout, sizes: Sequence[int], folder: Path | str = ""
    ) -> dict[str, object]:
        """Returns DeepSpeed's JSON config for the cell.

        `sizes`: elements of each trained parameter; `folder`: where `nvme` offloads to.
        """
        config = deepspeed_config(cell, layout)
        if self.stage == 0:
            return config
        bucket = self.bucket(sizes)
        zero: dict[str, object] = {
            "stage": self.stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket + bucket % 2,
        }
        disk = {"nvme_path": str(folder)}
        if (device := self.offload_optimizer) != "none":
            pinned = {"device": device, "pin_memory": cell.device == "cuda"}
            zero["offload_optimizer"] = pinned | (disk if device == "nvme" else {})
        if self.stage == 3:
            live = self.live(sizes)
            zero |= {
                "stage3_prefetch_bucket_size": self.prefetched(sizes),
                "stage3_max_live_parameters": live,
                "stage3_max_reuse_distance": live,
                "stage3_param_persistence_threshold": self.persistent(sizes),
                "sub_group_size": self.swapping(cell, layout.replicas, sizes).group_elements,
            }
        if cell.optimizer == "muon":
            zero["reduce_scatter"] = False  # Muon needs whole gradients
        if (device := self.offload_parameters) != "none":
            pinned = {"device": device, "pin_memory": cell.device == "cuda"}
            buffers = {
                "max_in_cpu": 0,
                "buffer_size": largest_part(sizes, layout.replicas),
                "buffer_count": SWAP_BUFFERS,
            }
            zero["offload_param"] = pinned | (disk | buffers if device == "nvme" else {})
        return config | {"zero_optimization": zero}


def deepspeed_config(cell: Cell, layout: Layout) -> dict[str, object]:
    """Returns DeepSpeed's JSON config without ZeRO. It sets `gradient_clipping`, because DeepSpeed
    clips at 1.0 by default. It also sets the batch size, because libraries would derive it from a
    process count that may be wrong."""
    config: dict[str, object] = {
        "train_batch_size": cell.global_batch,
        "train_micro_batch_size_per_gpu": cell.global_batch // layout.data // cell.micro_batches,
        "gradient_accumulation_steps": cell.micro_batches,
        "gradient_clipping": cell.clip_norm or 0.0,
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
        "timers": {"throughput": {"enabled": False}},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if cell.precision == "bf16":
        config["bf16"] = {"enabled": True}
    if cell.precision == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": LOSS_SCALE_POWER}
    return config


def require_locked(swapping: Swapping) -> None:
    """Raises Unavailable if a rank may not lock (mlock) its swap buffers.

    DeepSpeed does not notice that locking failed, and writes to an invalid address.
    """
    size = swapping.optimizer_buffer_bytes + swapping.parameter_buffer_bytes
    allowed = lockable_bytes()
    if size > allowed:
        raise Unavailable(
            f"DeepSpeed locks {size / 2**20:.1f} MiB of each rank's memory for its disk buffers,"
            f" but a process may lock {allowed / 2**20:.1f} MiB; raise the limit: ulimit -l"
            " unlimited (memlock in /etc/security/limits.conf; docker run --ulimit memlock=-1)"
        )
