"""Formulas of DeepSpeed's pipeline engine."""

from __future__ import annotations

from harness.strategy import Cell, Workload
from harness.strategy.formulas import KEPT_RESULTS, logits_bytes


def engine_buffers(stage: int, count: int, hidden: float, cell: Cell, workload: Workload) -> float:
    """Returns bytes of the engine's buffers in stage `stage` of `count`, between steps.

    Each boundary adds a buffer for one micro-batch's hidden states, or their gradients. The first
    stage keeps its latest token ids, the last its latest results and labels; ids have 8 bytes.
    Source: DeepSpeed 0.19, runtime/pipe/engine.py, `pipe_recv_buf`, `grad_layer`, `pipe_buffers`.
    `hidden`: bytes of hidden states of all of a rank's samples.
    """
    parts = cell.micro_batches
    samples, tokens = cell.global_batch // parts, cell.sequence_length
    kept = ((stage > 0) + (stage < count - 1)) * hidden / parts
    if stage == 0:
        kept += min(parts, max(KEPT_RESULTS, count)) * samples * tokens * 8
    if stage == count - 1:
        labels = samples * (1 if workload.num_labels else tokens) * 8
        kept += min(parts, KEPT_RESULTS) * (logits_bytes(workload, samples, tokens) + labels)
    return kept
