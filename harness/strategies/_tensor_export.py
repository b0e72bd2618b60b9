"""Export of tensor parallelism to standalone scripts."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from harness.strategy import Cell, Export, Refused, Workload, make_workload
from harness.workloads.family import Split

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


def tensor_export(cell: Cell, to: str, sequence_parallel: bool) -> Export | None:
    """Returns a script that splits transformers' model by torch's own plan."""
    workload = make_workload(cell.workload)
    if to not in ("torchrun", "slurm") or workload.split is None:
        return None
    return Export("tensor.py.j2", tensor_values(workload, workload.split, sequence_parallel))


def tensor_values(workload: Workload, split: Split, sequence_parallel: bool) -> dict[str, Any]:
    """Returns torch's plan as source text; raises Refused if the suite replaces modules before
    splitting."""
    if type(split).prepare_tensor is not Split.prepare_tensor:
        raise Refused(
            f"torch splits Linear layers, and those of {workload.name} are others, which the suite"
            " replaces first and a script of the library alone would not; take a llama workload"
        )
    plan = split.tensor_plan(sequence_parallel)
    written = {path: written_style(style) for path, style in plan.items()}
    named = " ".join(written.values())
    return {
        "plan": written,
        "styles": sorted({type(style).__name__ for style in plan.values()}),
        "placements": [name for name in ("Replicate", "Shard") if f"{name}(" in named],
    }


def written_style(style: ParallelStyle) -> str:
    """Returns the constructor call of a parallel style, with only its non-default arguments."""
    kind = type(style)
    usual, accepted = vars(kind()), inspect.signature(kind).parameters
    given = {
        name: value
        for name, value in vars(style).items()
        if name in accepted and value != usual[name]
    }
    return f"{kind.__name__}({', '.join(f'{n}={_written(v)}' for n, v in given.items())})"


def _written(value: object) -> str:
    """Formats a tuple of one placement as the placement, as torch's styles expect."""
    return repr(value[0] if isinstance(value, tuple) and len(value) == 1 else value)
