from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from harness.cell.errors import Refused, Unavailable
from harness.cell.training import Batch, Layout, States, TrainStep
from harness.seam import Cell, Job, ModelFacts, Strategy
from harness.seam.formulas import model_states
from harness.strategies import _sequence
from harness.workloads import Workload

if TYPE_CHECKING:
    from torch import Tensor


class ContextParallel(Strategy):
    """Ring attention (torch's context_parallel): keys and values circulate, queries stay.

    All heads stay on every rank, so their number does not limit the ranks (arXiv 2310.01889). Each
    rank has a chunk from the front of the sequence and one from the back, which balances the causal
    mask. With FSDP2, parameters are sharded over all ranks, as all average their gradients.
    """

    pass_by: Literal["allgather", "alltoall"] = "allgather"
    """How keys and values reach the other ranks: gathered at once, or passed around a ring."""
    sequence_ranks: int | None = Field(default=None, ge=1)
    """Number of neighbouring ranks that share each sample's tokens; by default all ranks. Groups
    are data parallel."""
    fsdp2: bool = False
    """Shard parameters over all ranks (FSDP2)."""

    def layout(self, devices: int) -> Layout:
        return _sequence.sequence_layout(devices, self.sequence_ranks)

    def check(self, cell: Cell, workload: Workload) -> None:
        if cell.device == "cpu":
            raise Unavailable(
                "torch's ring attention has kernels for GPUs only (flash, memory-efficient and"
                " cuDNN attention); use one GPU per rank"
            )
        ranks = self.layout(cell.devices).sequence
        if cell.sequence_length % (2 * ranks):
            raise Refused(
                f"each of {ranks} ranks gets two equal parts of a sequence, but"
                f" {cell.sequence_length} tokens do not divide evenly; use a multiple of"
                f" {2 * ranks} as sequence_length"
            )

    def setup(self, job: Job) -> TrainStep:
        import torch

        model = job.model()
        whole_positions = torch.arange(job.cell.sequence_length, device=job.device)[None]
        if job.layout.sequence == 1:
            # Keep the model's attention, which may not be causal.
            return _sequence.averaging_step(job, model, whole_positions, self.fsdp2)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import set_rotate_method

        set_rotate_method(self.pass_by)
        shape, names = (job.layout.data, job.layout.sequence), ("data", "sequence")
        mesh = init_device_mesh(job.device.type, shape, mesh_dim_names=names)["sequence"]
        _sequence.attend_by(model, "ring_attention", _sequence.even_attention)
        # Sharded in place with each batch, to hold the rank's token positions.
        positions = torch.empty(0, dtype=torch.long, device=job.device)
        step = _sequence.averaging_step(job, model, positions, self.fsdp2)

        def ring_step(batch: Batch) -> Tensor | None:
            positions.resize_(whole_positions.shape).copy_(whole_positions)
            # The sharded buffers replace the tensors of this part.
            part = batch.part(0, job.layout.sequence, dimension=1)
            names = ["inputs", "labels", *(["keys"] if batch.keys is not None else [])]
            buffers = [getattr(batch, name).clone() for name in names]
            everything = [*buffers, positions]
            with context_parallel(
                mesh,
                buffers=everything,
                buffer_seq_dims=[1] * len(everything),
                no_restore_buffers=set(everything),
            ):
                return step(dataclasses.replace(part, **dict(zip(names, buffers, strict=True))))

        return ring_step

    @property
    def shards_parameters(self) -> bool:
        return self.fsdp2

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States:
        return model_states(cell, facts, cell.devices if self.fsdp2 else 1)
