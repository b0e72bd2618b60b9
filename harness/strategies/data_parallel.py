"""torch.nn.DataParallel."""

from __future__ import annotations

from typing import Any

from harness.strategy import (
    Capabilities,
    Cell,
    CostModel,
    Job,
    Layout,
    Strategy,
    TrainStep,
    standard_step,
)


class DataParallel(Strategy):
    """torch.nn.DataParallel: replicate, scatter, apply, gather and update in one process.

    Without GPUs, it would only call the model; the same five steps run on one CPU thread per
    device.

    Autocast is entered inside each replica. Replica threads inherit only whether it is enabled
    (torch/nn/parallel/parallel_apply.py); on GPUs they would use fp16 even in bf16 cells.
    """

    capabilities = Capabilities(process_group=False)

    def layout(self, devices: int) -> Layout:
        return Layout(data=devices, devices_per_process=devices)

    def stand_in(self, cell: Cell) -> str | None:
        if cell.device == "cpu":
            return "CPU threads instead of GPUs, the same five steps"
        if cell.devices == 1:
            return "one GPU: torch.nn.DataParallel only calls the model, as `single` does"
        return None

    @property
    def costs(self) -> DataParallelCosts:
        return DataParallelCosts(self)

    def setup(self, job: Job) -> TrainStep:
        import torch

        from harness.strategies._data_parallel import in_autocast, on_threads

        first = job.model()
        optimizer = job.optimizer(first.parameters())
        job.register(first, optimizer)
        if job.device.type == "cuda":
            model: Any = torch.nn.DataParallel(
                in_autocast(job, first), device_ids=list(range(job.cell.devices))
            )
        else:
            model = on_threads(job, first)
        return standard_step(job, model, optimizer)


class DataParallelCosts(CostModel[DataParallel]):
    @property
    def uses_shared_memory(self) -> bool:
        return True
