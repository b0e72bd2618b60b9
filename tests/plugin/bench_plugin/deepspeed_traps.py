"""DeepSpeed strategies, each without one fix, and one that dumps its states."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from harness.seam import Cell, Job, Layout, TrainStep, Workload
from harness.strategies import _deepspeed, _deepspeed_engine
from harness.strategies._deepspeed_zero import SWAP_ELEMENTS
from harness.strategies.deepspeed import Deepspeed
from harness.strategies.deepspeed_pipeline import DeepspeedPipeline


class DeepspeedTraps(Deepspeed):
    """DeepSpeed without one of the strategy's fixes."""

    without: Literal["none", "clipping_off", "undone_step", "scaled_loss", "kept_dtype"] = "none"
    """The omitted fix; `none` omits no fix."""

    def check(self, cell: Cell, workload: Workload) -> None:
        if self.without != "scaled_loss":
            super().check(cell, workload)

    def config(
        self, cell: Cell, layout: Layout, sizes: Sequence[int], folder: Path | str = ""
    ) -> dict[str, Any]:
        config = super().config(cell, layout, sizes, folder)
        if self.without == "clipping_off":
            del config["gradient_clipping"]
        return config

    def setup(self, job: Job) -> TrainStep:
        if self.without == "kept_dtype":  # as on a CPU without fp16
            from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

            CPU_Accelerator.is_fp16_supported = lambda self: False
            _deepspeed.keep_dtype = lambda device: None
        if self.without == "undone_step":
            _deepspeed_engine.undo_first_step = lambda engine: None
        return super().setup(job)


class UntiedDeepspeedPipeline(DeepspeedPipeline):
    """DeepSpeed's pipeline whose end stages train separate copies of the tied embedding."""

    def layer(self, job: Job, index: int) -> Any:
        from deepspeed.pipe import LayerSpec

        from harness.seam.pipelining import Stage

        return LayerSpec(Stage, job, index, job.layout.pipeline)


class DeepspeedDump(Deepspeed):
    """DeepSpeed ZeRO-3 that writes each rank's in-memory states to files after each step.

    It uses the sub-groups and file names of DeepSpeed's swapper.
    """

    dump_folder: str = ""
    """Folder of the files."""

    def config(
        self, cell: Cell, layout: Layout, sizes: Sequence[int], folder: Path | str = ""
    ) -> dict[str, Any]:
        config: dict[str, Any] = super().config(cell, layout, sizes, folder)
        config["zero_optimization"]["sub_group_size"] = SWAP_ELEMENTS
        return config

    def setup(self, job: Job) -> TrainStep:
        import deepspeed

        initialize, made = deepspeed.initialize, []

        def remember(**told: Any) -> Any:
            made.append(initialize(**told))
            return made[0]

        deepspeed.initialize = remember
        step = super().setup(job)
        zero = made[0][0].optimizer
        folder = Path(self.dump_folder) / f"rank{job.rank}"
        folder.mkdir(parents=True)

        def dumped(batch: Any) -> Any:
            loss = step(batch)
            for group in zero.fp32_partitioned_groups_flat:
                group.detach().numpy().tofile(folder / f"{group.ds_id}.tensor.swp")
                for name in ("exp_avg", "exp_avg_sq"):
                    zero.optimizer.state[group][name].numpy().tofile(
                        folder / f"{name}-{group.ds_id}.tensor.swp"
                    )
            for parameters in zero.fp16_groups:
                for parameter in parameters:
                    parameter.ds_tensor.numpy().tofile(
                        folder / f"{parameter.ds_id}_param.tensor.swp"
                    )
            return loss

        return dumped
