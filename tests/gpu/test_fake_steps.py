"""Set-up and steps of torch's strategies on fake tensors: each tensor must be on its device.

The tests use CPU tensors, or with `python -m tests.gpu.fake_cuda` CUDA ones, which reveal a tensor
left in host memory. Fake tensors have no data, so only tests/ranks shows whether training is
correct.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from harness.cell.cell import Cell
from harness.cell.training import Batch, TrainStep
from harness.measure.memory_kinds import retained
from harness.parity.reference import full_parameters
from harness.seam.base import Capabilities, Strategy
from harness.seam.job import Job, standard_step
from harness.seam.registry import make_strategy
from tests.gpu.fake_world import DEVICE, fake_batch, one_rank

STEPS = 2
ELSEWHERE = "cpu" if DEVICE == "cuda" else "meta"
TWO_PARTS = {"micro_batches": 2}
TWO_RANKS: dict[str, Any] = {"worlds": (1, 2), "blocks_per_rank": 2, "cell": TWO_PARTS}

NCCL = "the model is copied with NCCL, which reads the devices' memory"
ADDRESSES = "DDP's C++ compares addresses of pinned memory, which fake tensors do not have"
SAME_DEVICE = "a fake tensor keeps its device when its data is exchanged (`flat_param.data = ...`)"


@dataclass(frozen=True)
class Case:
    """A strategy with options and the rest of its cell."""

    strategy: str
    options: dict[str, Any] = field(default_factory=dict)
    worlds: tuple[int, ...] = (1, 8)
    workload: str = "llama-512x2"
    """Model with 8 heads of 64, so that 8 ranks can share them."""
    blocks_per_rank: int = 0
    """Blocks of the model per rank, for strategies that split layers."""
    cell: dict[str, Any] = field(default_factory=dict)
    offloads: bool = False
    not_on_cuda: dict[int, str] = field(default_factory=dict)
    """World size -> why fake CUDA tensors cannot run it."""

    def at(self, devices: int) -> Cell:
        dealt = f"llama-512x{self.blocks_per_rank * devices}"
        fixed = {"global_batch": 16, "sequence_length": 16, "device": DEVICE} | self.cell
        workload = dealt if self.blocks_per_rank else self.workload
        return Cell(
            strategy=self.strategy,
            options=self.options,
            workload=workload,
            devices=devices,
            **fixed,
        )


CASES = [
    Case("single", worlds=(1,)),
    Case("single", worlds=(1,), cell={"precision": "fp16", **TWO_PARTS}),
    Case("single", worlds=(1,), cell={"precision": "bf16", "optimizer": "sgd"}),
    Case("single", worlds=(1,), workload="bert-micro"),
    Case("single", worlds=(1,), workload="resnet-micro"),
    Case("data_parallel", not_on_cuda={8: NCCL}),
    Case("ddp"),
    Case("ddp", {"static_graph": True}, not_on_cuda={1: ADDRESSES, 8: ADDRESSES}),
    Case("ddp", {"gradient_as_bucket_view": True}),
    Case("ddp", {"bucket_cap_mb": 1}, cell=TWO_PARTS),
    Case("ddp", {"comm_hook": "fp16"}),
    Case("ddp", {"comm_hook": "powersgd"}),
    Case("ddp_elastic", worlds=(8,)),
    Case("amp", {"opt_level": "O1"}, cell={"precision": "bf16"}),
    Case("amp", {"opt_level": "O2"}, cell={"precision": "fp16"}),
    Case("amp", {"opt_level": "O3"}, cell={"precision": "bf16"}),
    Case("zero_redundancy"),
    Case("zero_redundancy", {"parameters_as_bucket_view": True}),
    Case("fsdp1"),
    Case("fsdp1", {"use_orig_params": False}),
    Case("fsdp1", {"sharding": "shard_grad_op", "backward_prefetch": "none"}),
    Case("fsdp1", {"sharding": "hybrid_shard"}, worlds=(8,)),
    Case("fsdp2"),
    Case("fsdp2", {"reshard_after_forward": False, "prefetch": True}),
    Case("fsdp2", {"hybrid": True}, worlds=(8,), cell=TWO_PARTS),
    Case("fsdp2", {"mixed_precision": True}, cell={"precision": "bf16"}),
    Case("fsdp2", {"cpu_offload": True}, offloads=True),
    Case("tensor"),
    Case("tensor", {"sequence_parallel": True}),
    Case("tensor", worlds=(1,), workload="gpt2-nano"),
    Case("vertical", blocks_per_rank=1),
    Case("pipeline", {"schedule": "gpipe"}, blocks_per_rank=1, cell=TWO_PARTS),
    Case("pipeline", {"schedule": "1f1b"}, blocks_per_rank=1, cell={"micro_batches": 8}),
    Case("pipeline", {"schedule": "interleaved_1f1b"}, **TWO_RANKS),
    Case("pipeline", {"schedule": "interleaved_zero_bubble"}, **TWO_RANKS),
    Case("pipeline", {"schedule": "zbv"}, **TWO_RANKS),
    Case("pipeline", {"schedule": "gpipe"}, worlds=(8,), workload="gpt2-small", cell=TWO_PARTS),
    Case("three_d", worlds=(8,), cell=TWO_PARTS),
    Case("three_d", {"data_axis": "all_reduce"}, worlds=(8,), cell=TWO_PARTS),
    Case("three_d", {"data_axis": "zero1"}, worlds=(8,), cell=TWO_PARTS),
    Case("three_d", {"data_axis": "ddp"}, (8,), cell=TWO_PARTS, not_on_cuda={8: ADDRESSES}),
    Case("post_local_sgd", {"start_step": 1, "period": 1}),
    Case("collectives"),
    Case("collectives", {"average": "parameters"}),
    Case("sync_batch_norm", workload="resnet-micro"),
    Case("parameter_server"),
    Case("parameter_server", {"mode": "asynchronous"}, cell={"optimizer": "sgd"}),
]
if DEVICE == "cuda":  # refused on CPUs, which have no device to offload from and no NCCL
    CASES += [
        Case("ddp", {"comm_hook": "bf16"}),
        Case(
            "fsdp1",
            {"cpu_offload": True},
            offloads=True,
            not_on_cuda={1: SAME_DEVICE, 8: SAME_DEVICE},
        ),
    ]


def cells() -> Iterator[Any]:
    """Yields each case's cells; all but the largest world size are marked thorough."""
    for case in CASES:
        for devices in case.worlds:
            why = case.not_on_cuda.get(devices) if DEVICE == "cuda" else None
            marks = [pytest.mark.xfail(strict=True, reason=why)] if why else []
            marks += [pytest.mark.thorough] * (devices < max(case.worlds))
            cell = case.at(devices)
            yield pytest.param(cell, case.offloads, marks=marks, id=cell.name)


# Libraries use deprecated parts of torch, which these tests are not about.
quiet = pytest.mark.filterwarnings("ignore")


@quiet
@pytest.mark.parametrize(("cell", "offloads"), list(cells()))
def test_everything_is_on_the_device(cell: Cell, offloads: bool, tmp_path: Path) -> None:
    shown: dict[str, torch.Size] = {}
    losses: list[Tensor | None] = []
    ranks = ranks_that_differ(cell)
    for rank in ranks:
        with one_rank(cell, rank, tmp_path) as (strategy, job):
            step = strategy.setup(job)
            if rank in (ranks[0], ranks[-1]):
                losses += take_steps(job, step, offloads)
            assert job.train_state is not None
            shown |= {name: tensor.shape for name, tensor in full_parameters(job.train_state)}
            expected = {name: tensor.shape for name, tensor in job.model().named_parameters()}
            tied = job.workload.split.tied if job.workload.split else {}
    assert {tied.get(name, name): shape for name, shape in shown.items()} == expected
    assert any(loss is not None for loss in losses)


def ranks_that_differ(cell: Cell) -> list[int]:
    """Returns the first rank of each pipeline stage, as layers differ, and parameter servers."""
    layout = make_strategy(cell).layout(cell.devices)
    stages = range(0, layout.pipeline * layout.tensor, layout.tensor)
    return [*stages, *range(layout.processes - layout.servers, layout.processes)]


def take_steps(job: Job, step: TrainStep, offloads: bool = False) -> list[Tensor | None]:
    """Takes steps and returns their losses; fails if a tensor is on the wrong device."""
    assert job.train_state is not None
    where = torch.device("cpu") if offloads else job.device
    updates: list[set[torch.device | None]] = []

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        trained = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
        held_here = [p.grad for p in trained if p.numel()]
        updates.append({None if gradient is None else gradient.device for gradient in held_here})

    for optimizer in job.train_state.optimizers:
        optimizer.register_step_pre_hook(note)
    steps = 1 if job.layout.pipeline > 1 else STEPS
    losses = [step(fake_batch(job, index)) for index in range(steps)]
    for loss in losses:
        assert loss is None or (loss.device, loss.dim()) == (job.device, 0)
    assert bool(updates) == bool(job.train_state.optimizers)
    assert all(devices == {where} for devices in updates), updates
    kept = list(retained(job.train_state))
    buffers_on = {"library": job.device}
    wrong = [
        f"{kind} {name} on {tensor.device}"
        for kind, name, tensor in kept
        if isinstance(tensor, Tensor)
        and tensor.device != buffers_on.get(kind, where)
        and not (name == "step" and tensor.dim() == 0)  # AdamW counts its steps on the host
    ]
    assert not wrong, f"not on {where}: {wrong}"
    assert ("optimizer" in {kind for kind, *_ in kept}) == bool(job.train_state.optimizers)
    return losses


class Misplaced(Strategy):
    """A strategy of one process that leaves a tensor on a device other than its own."""

    capabilities = Capabilities(
        process_group=False,
    )

    what: Literal["nothing", "weight", "spare parameter", "moment", "loss"]
    """The tensor on the other device."""

    def setup(self, job: Job) -> TrainStep:
        model: Any = job.model()
        if self.what == "weight":
            model.lm_head.weight = nn.Parameter(model.lm_head.weight.to(ELSEWHERE))
        if self.what == "spare parameter":
            model.spare = nn.Parameter(torch.zeros(3, device=ELSEWHERE), requires_grad=False)
        optimizer = job.optimizer(model.parameters())
        job.register(model, optimizer)
        train = standard_step(job, model, optimizer)

        def step(batch: Batch) -> Tensor | None:
            loss = train(batch)
            assert loss is not None
            if self.what == "moment":
                moments = optimizer.state[model.lm_head.weight]
                moments["exp_avg"] = moments["exp_avg"].to(ELSEWHERE)
                return loss
            return loss.to(ELSEWHERE) if self.what == "loss" else loss

        return step


DEVICES = "same device|two different devices"
"""Errors of fake tensors; the second is from before torch 2.12."""
FAILURES = {
    "nothing": None,
    "weight": DEVICES,
    "spare parameter": f"parameters spare on {ELSEWHERE}",
    "moment": DEVICES,
    "loss": f"device\\(type='{ELSEWHERE}'",
}


@quiet
@pytest.mark.parametrize("what", FAILURES)
def test_a_misplaced_tensor_fails_the_check(what: Any, tmp_path: Path) -> None:
    cell = Case("single").at(1)
    strategy = Misplaced(what=what)
    with one_rank(cell, 0, tmp_path, strategy) as (_, job):
        step = strategy.setup(job)
        if FAILURES[what] is None:
            take_steps(job, step)
            return
        with pytest.raises((AssertionError, RuntimeError), match=FAILURES[what]):
            take_steps(job, step)
