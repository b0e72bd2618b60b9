from __future__ import annotations

import os
import runpy
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from harness.cell.cell import RECIPE, TECHNIQUES
from harness.cell.errors import Refused, UsageError
from harness.cell.training import Batch, Layout, TrainStep
from harness.host.user_code import first_line
from harness.seam import Capabilities, Cell, Job, Strategy, Workload
from harness.seam.job import parameters_of

if TYPE_CHECKING:
    from torch.optim import Optimizer


SET_BY_SCRIPTS = (*TECHNIQUES, *RECIPE, "precision", "optimizer", "learning_rate")
"""Axes that only a script itself can set."""


class Script(Strategy):
    """A training script as it is, with its own model, data and way to use several devices."""

    capabilities = Capabilities(
        process_group=False,
        unverified="a script has no reference run, so nobody checked what it trains",
        checkpoints=(),
        preload=("transformers", "accelerate"),
    )
    arguments: str = ""
    """Arguments of the script, as in a shell."""

    def layout(self, devices: int) -> Layout:
        return Layout(data=devices)

    def check(self, cell: Cell, workload: Workload) -> None:
        if given := [name for name in SET_BY_SCRIPTS if cell.is_set(name)]:
            raise Refused(f"a script sets its own {given[0]}: leave {given[0]} out")

    def setup(self, job: Job) -> TrainStep:
        if job.device.type == "cpu":
            os.environ["ACCELERATE_USE_CPU"] = "true"  # as `accelerate launch --cpu`
        torch.backends.cudnn.allow_tf32 = True  # torch's default
        script = _RunningScript(job.cell.strategy, shlex.split(self.arguments))
        for _ in range(2):  # other optimizers may step after the first one
            script.next_step()
        trained = nn.ParameterList(p for o in script.optimizers for p in parameters_of(o))
        job.register(trained, *script.optimizers)

        def step(batch: Batch) -> Tensor | None:
            script.next_step()
            return script.loss

        return step


class _RunningScript:
    """A script in a thread, which the harness lets run until its next optimizer step has ended.

    Steps of its first optimizer count. Libraries may call an optimizer several times per step, once
    for each part of its parameters, so a step only counts if a backward pass came before it.
    """

    def __init__(self, path: str, arguments: list[str]) -> None:
        self.path, self.arguments = path, arguments
        self.optimizers: list[Optimizer] = []
        self.loss: Tensor | None = None
        """Sum of the losses since the last step of any optimizer."""
        self._losses: list[Tensor] = []
        self._steps, self._backwards = 0, 0
        self._end = ""
        self._may_run, self._has_stopped = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self._run, name="script", daemon=True).start()

    def next_step(self) -> None:
        """Runs the script until the end of its next step; raises UsageError if it ends before."""
        self._may_run.release()
        self._has_stopped.acquire()
        if self._end:
            raise UsageError(f"{Path(self.path).name} {self._end}")

    def _run(self) -> None:
        self._may_run.acquire()
        self._watch()
        sys.argv = [self.path, *self.arguments]
        sys.path.insert(0, str(Path(self.path).parent))
        try:
            runpy.run_path(self.path, run_name="__main__")
            how, cause = "ended", ": let it train longer, or time it for fewer seconds"
        except SystemExit as error:
            how, cause = f"exited with {error.code or 0}", ""
        except BaseException as error:  # whatever a script raises
            traceback.print_exc()
            how, cause = "failed", f": {first_line(error)}"
        when = f"after {self._steps} steps" if self._steps else "before its first step"
        self._end = f"{how} {when} of an optimizer{cause}"
        self._has_stopped.release()

    def _watch(self) -> None:
        """Hooks optimizer steps and backward passes in this process. Signal handlers, which only a
        main thread may set, are left out."""
        register_optimizer_step_post_hook(self._after_step)
        backward: Callable[..., None] = torch.autograd.backward
        scale: Callable[..., object] = torch.amp.GradScaler.scale
        scaled: list[bool] = []

        def watched_backward(tensors: object, *args: object, **kwargs: object) -> None:
            backward(tensors, *args, **kwargs)
            self._backwards += 1
            if isinstance(tensors, Tensor) and tensors.numel() == 1 and not scaled:
                self._losses.append(tensors.detach())

        def watched_scale(scaler: torch.amp.GradScaler, outputs: object) -> object:
            if scaler.is_enabled():
                scaled.append(True)  # losses would be multiples of themselves
            return scale(scaler, outputs)

        mock.patch.object(torch.autograd, "backward", watched_backward).start()
        mock.patch.object(torch.amp.GradScaler, "scale", watched_scale).start()
        mock.patch.object(signal, "signal", lambda number, _: signal.getsignal(number)).start()

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        losses, self._losses = self._losses, []
        if all(optimizer is not other for other in self.optimizers):
            self.optimizers.append(optimizer)
        if optimizer is not self.optimizers[0] or not self._backwards:
            return
        self._backwards = 0
        self._steps += 1
        self.loss = torch.stack([loss.float().sum() for loss in losses]).sum() if losses else None
        self._has_stopped.release()
        self._may_run.acquire()
