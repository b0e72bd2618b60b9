from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from harness.cell.errors import Refused
from harness.cell.training import Batch, Layout, TrainStep
from harness.seam import Cell, Job
from harness.seam.formulas import passed_once
from harness.seam.job import standard_step
from harness.strategies.collectives import average_gradients
from harness.strategies.fsdp2 import shard_by_block, shard_mesh
from harness.workloads import Workload, make_workload

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from transformers import PretrainedConfig, PreTrainedModel

    from harness.workloads.workload import HasLogits

Attention = Callable[..., tuple["Tensor", "Tensor | None"]]
"""A transformers attention function: (module, queries, keys, values, mask, keyword arguments) ->
(output, weights). Queries, keys and values are (samples, heads, tokens, head width), the output
(samples, tokens, heads, head width)."""


def sequence_layout(devices: int, sequence_ranks: int | None) -> Layout:
    """Returns data-parallel groups of `sequence_ranks` neighbouring ranks; if that is None, one
    group of all. Raises Refused if the groups do not divide the devices."""
    ranks = sequence_ranks or devices
    if devices % ranks:
        raise Refused(f"{devices} devices do not divide into groups of sequence_ranks={ranks}")
    return Layout(data=devices // ranks, sequence=ranks)


def check_heads(workload: Workload, ranks: int, repeats_keys: bool = False) -> None:
    """Raises Refused if the heads, or the key and value heads of grouped-query attention, do not
    divide evenly. `repeats_keys`: whether ranks may share a key and value head."""
    keys = workload.heads
    uneven = keys % ranks and not (repeats_keys and ranks % keys == 0)
    if uneven or workload.query_heads % ranks:
        raise Refused(
            f"{workload.name} has {workload.query_heads} attention heads and {keys} key and value"
            f" heads, which do not divide among {ranks} ranks; use a divisor of {keys} as"
            " sequence_ranks"
        )


def check_config(workload: Workload) -> None:
    """Raises Refused if DeepSpeed's UlyssesSPAttentionHF does not support the model.

    It needs the number of key-value heads in the config.
    """
    if workload.family and "num_key_value_heads" not in workload.config:
        raise Refused(
            "DeepSpeed's UlyssesSPAttentionHF needs a config with the number of key and value"
            f" heads, which {workload.name}'s lacks: use the strategy ulysses, or a llama workload"
        )


@dataclass(frozen=True)
class SequencePart:
    """Part of each sample: from `number` / `parts` to (`number` + 1) / `parts`."""

    number: int
    parts: int

    @classmethod
    def of(cls, job: Job) -> SequencePart:
        return cls(job.rank % job.layout.sequence, job.layout.sequence)

    def cut(self, batch: Batch) -> Batch:
        """Returns this part of a batch. Labels are already shifted: the last label is the next
        part's first token."""
        return batch.part(self.number, self.parts, dimension=1)

    def positions(self, job: Job) -> Tensor:
        """Returns positions in the whole sample (1, tokens of the part)."""
        import torch

        whole = torch.arange(job.cell.sequence_length, device=job.device)
        return whole.chunk(self.parts)[self.number][None]


def at_positions(
    model: Callable[..., Tensor | HasLogits], positions: Tensor
) -> Callable[[Tensor], Tensor | HasLogits]:
    """Fixes the model's position ids, which would start at 0 in each part."""
    return functools.partial(model, position_ids=positions)


def averaging_step(
    job: Job, model: nn.Module, positions: Tensor, shards: bool = False
) -> TrainStep:
    """Returns a step on a rank's tokens at these positions. Attention sends gradients back to where
    keys and values came from. Ranks have equally many tokens, so averaged gradients are those of
    the mean loss. If it `shards`, FSDP2 averages over all ranks."""
    if shards:
        shard_by_block(model, job.workload.blocks_of(model), shard_mesh(job))
    parameters = list(model.parameters())
    optimizer = job.optimizer(parameters)
    job.register(model, optimizer)
    if shards:
        return standard_step(job, at_positions(model, positions), optimizer)
    average = functools.partial(average_gradients, parameters)
    return standard_step(job, at_positions(model, positions), optimizer, before_update=average)


def sequence_group(job: Job) -> ProcessGroup:
    """Returns the group that shares this rank's samples; call on all ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    shape, names = (job.layout.data, job.layout.sequence), ("data", "sequence")
    mesh = init_device_mesh(job.device.type, shape, mesh_dim_names=names)
    return mesh.get_group("sequence")


def config_of(model: nn.Module) -> PretrainedConfig:
    return cast("PreTrainedModel", model).config


def attend_by(model: nn.Module, name: str, attention: Attention) -> None:
    """Registers this attention in transformers and uses it in all layers.

    transformers passes it no mask, which would cover only this rank's tokens.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(name, attention)
    config_of(model)._attn_implementation = name


def whole_attention() -> Attention:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return cast("Attention", sdpa_attention_forward)


def even_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: None,
    scaling: float | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Applies torch's causal attention, repeating key and value heads. torch's ring attention,
    which can replace this call, supports neither dropout nor grouped-query attention."""
    from torch.nn import functional

    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    output = functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling
    )
    return output.transpose(1, 2), None


def exchanged_for_heads(
    cell: Cell, layout: Layout, gathers_positions: bool = False
) -> float | None:
    """Returns the bytes that a rank sends per step in DeepSpeed-Ulysses' all-to-alls, averaged over
    ranks (arXiv 2309.14509, section 3.2: 4Nh/P). None unless the precision is fp32.

    A block has four all-to-alls (queries, keys, values, outputs) each way; recomputation repeats
    those of forward. If grouped-query attention has fewer key and value heads than ranks, they are
    repeated. `gathers_positions` adds 8 bytes per token and computed block.
    """
    workload, ranks = make_workload(cell.workload), layout.sequence
    if cell.precision != "fp32" or not workload.query_heads:
        return None
    widths = 2 * workload.head_width * (workload.query_heads + max(workload.heads, ranks))
    element_bytes = 2.0 if workload.arithmetic else 4.0
    tokens = cell.global_batch / layout.data * cell.sequence_length / ranks
    passes = 2 if cell.recompute == "none" else 3
    exchanged = passed_once(ranks, element_bytes * tokens * widths) * passes
    gathered = passed_once(ranks, 8.0 * cell.sequence_length) * (passes - 1) * cell.micro_batches
    return workload.blocks * (exchanged + (gathered if gathers_positions else 0.0))


def exchanges(cell: Cell, layout: Layout, gathers_positions: bool = False) -> float:
    """Counts collectives per step; see `exchanged_for_heads`."""
    if layout.sequence == 1:
        return 0.0
    passes = 2 if cell.recompute == "none" else 3
    gathers = passes - 1 if gathers_positions else 0
    return float(make_workload(cell.workload).blocks * cell.micro_batches * (4 * passes + gathers))
