"""Breakdown of a GPU's time during a step.

Kernels are classified by the names that torch's libraries on NVIDIA GPUs give them (cuBLAS, cuDNN,
CUTLASS, Triton, FlashAttention, NCCL).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from harness.measure.breakdown import Busy, Event, Kind
from harness.record.profile import GPU_PARTS

_ATTENTION = re.compile(r"flash|fmha|sdpa|attention|mha_(fwd|bwd|varlen)", re.IGNORECASE)
_OPTIMIZER = re.compile(r"multi_tensor_apply|fused_?adam|adam_?w|koptimizer", re.IGNORECASE)
_LISTS_OF_TENSORS = re.compile(r"multi_tensor_apply.*(copy|norm)", re.IGNORECASE)
"""Buffer copies (FSDP) and norms (gradient clipping)."""
_TORCHS_OWN = re.compile(
    r"elementwise_kernel|(?<!splitk)reduce_kernel|triton_(poi|red|per)_", re.IGNORECASE
)
"""Kernels whose names may also contain the operator they are fused with."""
_MATMUL = re.compile(
    r"gemm|gemv|matmul|nvjet|cutlass|tensorop|splitk|_mma_|triton_tem_fused"
    r"|conv\d?d|_conv_|convolve|fprop|dgrad|wgrad|winograd",
    re.IGNORECASE,
)


def kernel_kind(name: str) -> Kind:
    """Classifies a kernel, other than a collective's, by name."""
    if _OPTIMIZER.search(name):
        return "device compute" if _LISTS_OF_TENSORS.search(name) else "device update"
    if _TORCHS_OWN.search(name):
        return "device compute"
    if _ATTENTION.search(name):
        return "device attention"
    return "device matmul" if _MATMUL.search(name) else "device compute"


_PARTS: dict[Kind, str] = {
    "device matmul": "matmul",
    "device attention": "attention",
    "device update": "optimizer",
    "device compute": "kernels",
    "device communication": "communication",
    "device transfer": "communication",
    "device copy": "copy",
}
_COMPUTES = ("device matmul", "device attention", "device update", "device compute")


def gpu_parts(
    events: Sequence[Event], begin: float, end: float, step_seconds: float
) -> dict[str, float]:
    """Returns the seconds of each of GPU_PARTS in [begin, end], with names prefixed by `gpu_`.

    Empty if there are no device events. If kernels overlap, the first of GPU_PARTS counts. Compute
    kernels within the device's optimizer step count as the optimizer. `step_seconds`: the step by
    the clock, which the parts sum to; time without events is idle.
    """
    near = [e for e in events if e.kind.startswith("device") and e.end > begin and e.begin < end]
    if not near:
        return {}
    updating = Busy.of(e for e in near if e.kind == "device optimizer")
    busy = {kind: Busy.of(e for e in near if e.kind == kind) for kind in _PARTS}
    cuts = sorted({begin, end, *(t for e in near for t in (e.begin, e.end) if begin < t < end)})
    seconds = dict.fromkeys(GPU_PARTS, 0.0)
    for first, last in itertools.pairwise(cuts):
        middle = (first + last) / 2
        running = next((kind for kind in _PARTS if busy[kind].at(middle)), None)
        part = "idle" if running is None else _PARTS[running]
        if running in _COMPUTES and updating.at(middle):
            part = "optimizer"
        seconds[part] += last - first
    seconds["idle"] = step_seconds - sum(s for part, s in seconds.items() if part != "idle")
    return {f"gpu_{part}": s for part, s in seconds.items()}
