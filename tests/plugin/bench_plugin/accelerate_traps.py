"""Accelerate without one of the strategy's precautions."""

import os
from typing import Any, Literal

from harness.seam import Cell, Job, TrainStep
from harness.strategies import _accelerate
from harness.strategies.accelerate import Accelerate

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
MAKE = _accelerate.make_accelerator


class AccelerateTraps(Accelerate):
    """Accelerate with one mistake."""

    trap: Literal[
        "none",
        "no_variables",
        "no_cpu",
        "threads",
        "fsdp_on_cpu",
        "clipping",
        "batch_sizes",
        "unnamed_backend",
        "inner_optimizer",
        "scheduler",
    ] = "none"
    """The omitted precaution."""
    verified: bool = True
    """Keep the strategy's check of the configuration that Accelerate detected."""

    def deepspeed_config(self, cell: Cell) -> Any:
        config: Any = super().deepspeed_config(cell)
        if self.trap == "clipping":
            config["gradient_clipping"] = "auto"
        if self.trap == "batch_sizes":
            config["train_batch_size"] = "auto"
        return config

    def accelerator(self, *arguments: Any) -> Any:
        import accelerate
        import torch
        from accelerate.utils import InitProcessGroupKwargs

        init = accelerate.Accelerator.__init__

        def changed(self_: Any, *, cpu: bool, kwargs_handlers: list[Any], **more: Any) -> None:
            if self.trap in ("batch_sizes", "unnamed_backend"):
                kwargs_handlers = [
                    handler
                    for handler in kwargs_handlers
                    if not isinstance(handler, InitProcessGroupKwargs)
                ]
            if self.trap == "scheduler":
                del more["dataloader_config"]
            init(self_, cpu=cpu and self.trap != "no_cpu", kwargs_handlers=kwargs_handlers, **more)
            self_.threads_taken = torch.get_num_threads()

        accelerate.Accelerator.__init__ = changed
        hidden = {name: os.environ.pop(name) for name in VARIABLES if self.trap == "no_variables"}
        made = MAKE(*arguments)
        os.environ.update(hidden)
        if self.trap == "threads":
            torch.set_num_threads(made.threads_taken)
        return made

    def setup(self, job: Job) -> TrainStep:
        _accelerate.make_accelerator = self.accelerator
        if not self.verified:
            _accelerate.verify = lambda *arguments: None
        if self.trap == "fsdp_on_cpu":
            _accelerate.pretend_gpus = lambda: None
        if self.trap == "inner_optimizer":
            from accelerate.optimizer import AcceleratedOptimizer

            AcceleratedOptimizer.step = lambda self: self.optimizer.step()
            AcceleratedOptimizer.zero_grad = lambda self: self.optimizer.zero_grad()
        step = super().setup(job)
        if job.train_state and not self.verified:
            job.train_state.library = None  # no DDP, so no DDP buckets
        return step
