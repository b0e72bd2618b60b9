from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Literal

from harness.cell.errors import Refused
from harness.cell.training import EXACT, Tolerance, TrainStep
from harness.seam import Cell, Job, Strategy
from harness.seam.checkpoints import StateFiles, Tensors, moments_of
from harness.seam.job import loss_scaler, own_precision, standard_step
from harness.strategies._half import WHOLLY, half_throughout
from harness.strategies.ddp import ddp_buckets, wrap_in_ddp
from harness.workloads import Workload
from harness.workloads.low_precision import halve

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import Optimizer

LOST = Tolerance(
    EXACT.loss,
    EXACT.update,
    "weights are in half precision: an update smaller than half a unit in their last place is lost",
)


class Amp(Strategy):
    """Apex-style AMP under DDP: autocast (O1), half with fp32 master weights (O2), pure half (O3).

    Half is the cell's precision; O1 and O2 scale the fp16 loss dynamically. As in apex, O2 keeps
    BatchNorm in fp32. Unlike in apex, master weights start from the unrounded weights and rotary
    frequencies stay fp32, so that levels differ only in how they train.

    Each level is compared with itself in one process. O3 loses updates: in bf16, a step of 1e-3
    never moves a norm weight of 1.0. Pure fp16 with AdamW diverges: a squared gradient below 6e-8
    becomes zero, and the step is then divided by epsilon alone.
    """

    opt_level: Literal["O0", "O1", "O2", "O3"] = "O1"
    """O0: fp32; O1: autocast; O2: half model, fp32 master weights; O3: half model and update."""
    rounded_masters: bool = False
    """Start O2's fp32 master weights from the half weights, as apex and DeepSpeed do."""

    def check(self, cell: Cell, workload: Workload) -> None:
        if self.opt_level == "O2" and cell.checkpoint not in ("none", "full"):
            raise Refused("O2's optimizer has master weights without names; use checkpoint full")
        if (self.opt_level == "O0") != (cell.precision == "fp32"):
            levels = f"{self.opt_level} cannot be combined with {cell.precision}"
            raise Refused(f"opt level O0 is fp32, O1 to O3 are fp16 or bf16: {levels}")
        if self.rounded_masters and self.opt_level != "O2":
            raise Refused(f"rounded_masters needs opt_level O2, not {self.opt_level}")

    def tolerance(self, cell: Cell, workload: Workload) -> Tolerance:
        return {"O2": WHOLLY, "O3": LOST}.get(self.opt_level, EXACT)

    def reference(self, cell: Cell) -> Cell:
        if self.opt_level == "O2":
            return half_throughout(cell, self.layout(cell.devices), self.rounded_masters)
        if self.opt_level == "O3":
            return cell.reference("amp", {"opt_level": "O3"})
        return cell.reference()

    def setup(self, job: Job) -> TrainStep:
        whole = job.model()
        names = [name for name, _ in whole.named_parameters()]
        masters: list[Tensor] = []
        if self.opt_level == "O2":
            masters = [p.detach().clone() for p in whole.parameters()]
        half = self.opt_level in ("O2", "O3")
        if half:
            halve(whole, job.dtype(), keep_batch_norm=self.opt_level == "O2")
        for master, parameter in zip(masters, whole.parameters(), strict=False):
            if self.rounded_masters:
                master.copy_(parameter.detach())
            master.requires_grad_(parameter.requires_grad)
        model = wrap_in_ddp(job, whole)
        parameters = list(whole.parameters())
        optimizer = job.optimizer(masters or parameters)
        if not masters:
            job.register(model, optimizer).library = lambda: ddp_buckets(model)
            job = own_precision(job) if half else job
            return standard_step(job, model, optimizer, no_sync=model.no_sync)

        def copy_back(*_: object) -> None:
            for master, parameter in zip(masters, parameters, strict=True):
                parameter.detach().copy_(master.detach())

        optimizer.register_step_post_hook(copy_back)  # not called if loss scaling skips a step
        named = dict(zip(names, masters, strict=True))
        files = StateFiles(job, {"masters": Tensors(named), "optimizer": optimizer, "model": model})
        registered = job.register(model, optimizer)
        registered.gather = lambda: iter(named.items())
        registered.moments = lambda: moments_of(named.items(), [optimizer])
        registered.library = lambda: chain(
            ddp_buckets(model), (("library", "fp32 master weights", p) for p in masters)
        )
        job.save_by(files.save, files.load)
        return self.step_by_masters(job, model, optimizer, masters)

    def step_by_masters(
        self,
        job: Job,
        model: DistributedDataParallel,
        optimizer: Optimizer,
        masters: Sequence[Tensor],
    ) -> TrainStep:
        """Returns O2's step, which moves gradients to the master weights."""
        parameters = list(model.parameters())

        def hand_over() -> None:
            for master, parameter in zip(masters, parameters, strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.float()
                parameter.grad = None

        plain, scaler = own_precision(job), loss_scaler(job)
        return standard_step(
            plain, model, optimizer, no_sync=model.no_sync, before_update=hand_over, scaler=scaler
        )
