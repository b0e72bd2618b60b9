"""Almost correct training: each mistake hardly shows in the losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from harness.seam import Batch, Cell, Job, Strategy, Tolerance, TrainStep, Workload

Change = Callable[[], None]


class Counted:
    """A step count, registered like a library's counter."""

    steps = 0


class Subtle(Strategy):
    """Hand-written data parallelism with one mistake."""

    mistake: Literal[
        "none",
        "half_gradients",
        "half_moment",
        "undecayed_embedding",
        "half_undecayed",
        "one_element",
        "frozen_statistics",
        "no_exchange",
        "no_decay",
        "last_part",
        "other_epsilon",
        "rare_rows",
        "half_exchange",
    ] = "none"
    """The planted mistake."""
    from_step: int = 0
    """First wrong step, counted by a registered counter."""
    from_optimizer_step: int = 0
    """First wrong step, counted by the optimizer, whose count a rewind restores."""
    wide: bool = False
    """Declare a tolerance that allows anything."""

    def tolerance(self, cell: Cell, workload: Workload) -> Tolerance:
        if self.wide:
            return Tolerance(1.0, 3.0, "trains something else by design")
        return super().tolerance(cell, workload)

    def setup(self, job: Job) -> TrainStep:
        model = job.model()
        optimizer: Any = job.optimizer(model.parameters())
        if self.mistake == "other_epsilon":
            optimizer.param_groups[0]["eps"] = 1e-6
        counted = Counted()
        job.register(model, optimizer).counters = [(counted, "steps")]
        made = _Made(self.mistake, job, model, optimizer)

        def step(batch: Batch) -> object:
            begun = counted.steps >= self.from_step
            begun &= made.optimizer_step >= self.from_optimizer_step
            counted.steps += 1
            return made.step(batch, self.mistake if begun else "none")

        return step  # type: ignore[return-value]


class _Made:
    def __init__(self, mistake: str, job: Job, model: Any, optimizer: Any) -> None:
        self.job, self.model, self.optimizer = job, model, optimizer
        self.names = {p: name for name, p in model.named_parameters()}
        self.large = max(self.names, key=lambda p: p.numel())
        self.element: int | None = None
        """Element of the large tensor that is never exchanged."""

    def step(self, batch: Batch, wrong: str) -> Any:
        import torch

        if wrong == "frozen_statistics":
            for module in self.model.modules():
                if isinstance(module, torch.nn.BatchNorm2d):
                    module.momentum = 0.0
        total = torch.zeros(())
        parts = self.job.cell.micro_batches
        for index, part in enumerate(batch.split(parts)):
            last = wrong == "last_part" and index == parts - 1
            loss = self.job.loss(self.model, part) / parts
            (loss * 1.001 if last else loss).backward()
            total += loss.detach()
        for parameter in self.names:
            self.average(parameter, wrong)
        before = {p: p.detach().clone() for p in self.names}
        self.update(wrong)
        self.after(wrong, before)
        self.optimizer.zero_grad()
        return total

    @property
    def optimizer_step(self) -> int:
        return max((int(state["step"]) for state in self.optimizer.state.values()), default=0)

    def average(self, parameter: Any, wrong: str) -> None:
        import torch
        import torch.distributed as dist

        gradient, size = parameter.grad, dist.get_world_size()
        if wrong == "no_exchange":
            return
        own = gradient.clone()
        if wrong == "half_gradients":
            scaled = (gradient * 1024).to(torch.float16).float()
            dist.all_reduce(scaled)
            gradient.copy_(scaled.to(torch.float16).float() / 1024 / size)
            return
        if wrong == "half_exchange":
            half = gradient.bfloat16()
            dist.all_reduce(half)
            gradient.copy_(half)
        else:
            dist.all_reduce(gradient)
        gradient /= size
        if wrong == "rare_rows" and "embed" in self.names[parameter]:
            gradient[128:] = own[128:]  # of bytes that are not ASCII, which text hardly has
        if wrong == "one_element" and parameter is self.large:
            if self.element is None:
                self.element = int(gradient.abs().argmax())
            gradient.view(-1)[self.element] = own.view(-1)[self.element]

    def update(self, wrong: str) -> None:
        if wrong == "no_decay":
            self.optimizer.param_groups[0]["weight_decay"] = 0.0
        self.optimizer.step()

    def after(self, wrong: str, before: dict[Any, Any]) -> None:
        import torch

        cell = self.job.cell
        decay = cell.learning_rate * cell.weight_decay
        with torch.no_grad():
            for parameter, name in self.names.items():
                if wrong == "half_moment":
                    state = self.optimizer.state[parameter]["exp_avg"]
                    state.copy_(state.to(torch.float16))
                embeds = "embed" in name or "wte" in name
                if wrong == "undecayed_embedding" and embeds:
                    parameter += decay * before[parameter]
                if wrong == "half_undecayed" and parameter.ndim >= 2:
                    half = len(parameter) // 2
                    parameter[:half] += decay * before[parameter][:half]
