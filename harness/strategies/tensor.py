from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from harness.cell.errors import Refused
from harness.cell.training import Layout, States, TrainStep
from harness.seam import Capabilities, Cell, Export, Job, ModelFacts, Strategy
from harness.seam.formulas import all_reduced, facts_of_part, hidden_bytes, model_states
from harness.seam.job import standard_step
from harness.workloads import Workload, make_workload
from harness.workloads.family import Split

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


class TensorParallel(Strategy):
    """Tensor parallelism: attention and MLP weights split over the ranks by column, then by row.

    Embedding and head stay whole unless `sequence_parallel`, so with a large vocabulary every rank
    repeats much work.
    """

    capabilities = Capabilities(precisions=("fp32", "bf16"), compiles=("block",))

    sequence_parallel: bool = False
    """Also split the sequence over the ranks in token-wise operations (norms, residuals)."""

    def layout(self, devices: int) -> Layout:
        return Layout(tensor=devices)

    def check(self, cell: Cell, workload: Workload) -> None:
        workload.check_split(self.layout(cell.devices))
        if workload.split:
            workload.split.check_tensor(self.sequence_parallel)
        if self.sequence_parallel and cell.documents == "packed":
            raise Refused(
                "blocks of a split sequence are called without the documents' mask; use"
                " sequence_parallel=false, or documents one"
            )
        if self.sequence_parallel and cell.compile != "none":
            raise Refused(
                "torch.compile mistakes tensors split along the sequence for plain ones, and"
                " fails; use sequence_parallel=false, or compile none"
            )
        if self.sequence_parallel and cell.sequence_length % cell.devices:
            raise Refused(
                f"sequence_parallel needs a sequence length that divides by {cell.devices} devices,"
                f" not {cell.sequence_length}"
            )
        if self.sequence_parallel and workload.vocabulary % cell.devices:
            raise Refused(
                f"sequence_parallel splits the {workload.vocabulary} tokens of {workload.name}'s"
                f" vocabulary, which are not divisible by {cell.devices} devices; use"
                " sequence_parallel=false"
            )

    def export(self, cell: Cell, to: str) -> Export | None:
        workload = make_workload(cell.workload)
        if to not in ("torchrun", "slurm") or workload.split is None:
            return None
        values = tensor_values(workload, workload.split, self.sequence_parallel, converts=True)
        return Export("tensor.py.j2", values)

    def setup(self, job: Job) -> TrainStep:
        from torch.distributed.device_mesh import init_device_mesh

        from harness.seam.pipelining import Stage, split_tensors

        stage = Stage(job)
        restore = split_tensors(
            stage, init_device_mesh(job.device.type, (job.layout.tensor,)), self.sequence_parallel
        )
        optimizer = job.optimizer(stage.parameters())
        job.register(stage.model, optimizer).restore = restore
        # A split sequence needs explicit positions, which the stage knows.
        return standard_step(job, stage if self.sequence_parallel else stage.model, optimizer)

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States | None:
        """Returns states of the split model. Sequence parallelism also splits embedding and
        head."""
        split = make_workload(cell.workload).split
        if split is None:
            return None

        def held(name: str) -> float:
            return 1 / layout.tensor if split.is_split(name, self.sequence_parallel) else 1

        local_facts = facts_of_part(facts, held)
        return model_states(cell, local_facts) if local_facts else None

    def activation_bytes(self, cell: Cell, layout: Layout, workload: Workload) -> float | None:
        """Returns activation bytes. Sequence parallelism also splits tokens outside split layers
        (arXiv 2205.05198, section 4.2.2)."""
        if workload.split is None or not workload.split.one_reduction_each:
            return None
        shared = self.sequence_parallel and layout.tensor > 1
        return self.counted_activations(cell, layout, workload, shared)

    def traffic(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float | None:
        """Returns bytes of hidden-state all-reduces.

        A layer split by row has an all-reduce in forward, a layer split by column has one in
        backward. Megatron-LM (arXiv 1909.08053, section 3) needs four per block. torch, which
        reduces the gradients of each layer's input, needs seven for Llama. A recomputed block
        repeats all forward all-reduces except the last.
        """
        workload, hidden = make_workload(cell.workload), hidden_bytes(cell, layout)
        if hidden is None or workload.split is None or self.sequence_parallel:
            return None
        if not workload.split.one_reduction_each:
            return None
        forward = len(workload.split.by_row)
        repeated = forward - 1 if cell.recompute != "none" else 0
        reduced = len(workload.split.by_column) + forward + repeated
        return all_reduced(layout.tensor, workload.blocks * reduced * hidden)


def tensor_values(
    workload: Workload, split: Split, sequence_parallel: bool, converts: bool = False
) -> dict[str, Any]:
    """Returns torch's plan as source; raises Refused if the suite replaces modules first, unless
    the template `converts` them."""
    replaced = type(split).prepare_tensor is not Split.prepare_tensor
    if replaced and not converts:
        raise Refused(
            f"torch splits only Linear layers; {workload.name} has others, which the suite"
            " replaces first and a standalone script would not; use a llama workload"
        )
    plan = split.tensor_plan(sequence_parallel)
    written = {path: written_style(style) for path, style in plan.items()}
    named = " ".join(written.values())
    return {
        "plan": written,
        "replaced": replaced,
        "styles": sorted({type(style).__name__ for style in plan.values()}),
        "placements": [name for name in ("Replicate", "Shard") if f"{name}(" in named],
    }


def written_style(style: ParallelStyle) -> str:
    """Writes a parallel style's constructor call with its non-default arguments."""
    kind = type(style)
    usual, accepted = vars(kind()), inspect.signature(kind).parameters
    given = {
        name: value
        for name, value in vars(style).items()
        if name in accepted and value != usual[name]
    }
    return f"{kind.__name__}({', '.join(f'{n}={_written(v)}' for n, v in given.items())})"


def _written(value: object) -> str:
    return repr(value[0] if isinstance(value, tuple) and len(value) == 1 else value)
