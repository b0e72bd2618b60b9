from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from harness.measure.memory_kinds import local_part
from harness.record.checkpoint import NAME, Manifest
from harness.seam.checkpoints import counters_of, load_by_torch, save_by_torch
from harness.worker.rank_answer import (
    CheckpointedState,
    LoadedAnswer,
    RankAnswer,
    SavedAnswer,
    answer_file,
)

if TYPE_CHECKING:
    from torch import Tensor

    from harness.seam.job import TrainState
    from harness.worker.loop import Loop

STEPS_MEANWHILE = 2
"""Number of steps trained during an asynchronous save, which must not change what is saved."""
_POLL_SECONDS = 0.005


@dataclass
class Saver:
    """Saves a rank's state once, answers, and kills the rank."""

    loop: Loop
    folder: Path
    step: int
    """Number of steps before the checkpoint."""
    answer: RankAnswer
    _finish: Callable[[], object] | None = None
    _saved: SavedAnswer | None = None
    _began: float = 0.0

    def after_step(self) -> None:
        done = len(self.loop.steps)
        if done == self.step:
            self._save()
        meanwhile = STEPS_MEANWHILE if self._finish else 0
        if done == self.step + meanwhile:
            self._end()

    def _save(self) -> None:
        train_state, job = self.loop.job.train_state, self.loop.job
        assert train_state is not None
        self.loop.stop_counting()
        before = _state_of(train_state)
        self.loop.synchronize()
        self._began = time.perf_counter()
        if train_state.save:
            self._finish = train_state.save(self.folder, self.step)
        else:
            self._finish = save_by_torch(job, train_state, self.folder, self.step)
        blocked = time.perf_counter() - self._began
        self._saved = SavedAnswer(tuple(self.loop.steps), blocked, blocked, before)

    def _end(self) -> None:
        """Kills this rank once all have answered and the manifest is written."""
        assert self._saved is not None
        if self._finish:
            began = time.perf_counter()
            self._finish()
            waited = time.perf_counter() - began
            self._saved = replace(
                self._saved,
                save_seconds=time.perf_counter() - self._began,
                blocked_seconds=self._saved.blocked_seconds + waited,
            )
        scratch, ranks = self.loop.spec.scratch, self.loop.spec.processes
        replace(self.answer, saved=self._saved).write(scratch)
        if self.answer.rank == 0:
            self._wait(lambda: all(answer_file(scratch, rank).exists() for rank in range(ranks)))
            Manifest.of(self.folder, self.step, ranks).write(self.folder)
        self._wait((self.folder / NAME).exists)
        os.kill(os.getpid(), signal.SIGKILL)

    def _wait(self, until: Callable[[], bool]) -> None:
        """Waits for other ranks, which does not count as a hang."""
        while not until():
            if self.loop.heartbeat:
                self.loop.heartbeat.beat("checkpoint")
            time.sleep(_POLL_SECONDS)


def resume(loop: Loop, folder: Path, step: int) -> None:
    """Loads a checkpoint and continues from it. Raises RuntimeError if its step is not `step`."""
    job, train_state = loop.job, loop.job.train_state
    assert train_state is not None
    began = time.perf_counter()
    if train_state.load:
        loaded_step = train_state.load(folder)
    else:
        loaded_step = load_by_torch(job, train_state, folder)
    loop.synchronize()
    seconds = None if train_state.loads_in_setup else time.perf_counter() - began
    if loaded_step != step:
        raise RuntimeError(
            f"the checkpoint was saved after step {step}, but training would go on after"
            f" {loaded_step}"
        )
    loop.continue_at(loaded_step, LoadedAnswer(seconds, _state_of(train_state)))


def _state_of(train_state: TrainState) -> CheckpointedState:
    import torch

    random, tensors = hashlib.blake2b(digest_size=8), hashlib.blake2b(digest_size=8)
    random.update(_bytes(torch.get_rng_state()))
    for value in _trained(train_state):
        tensors.update(
            _bytes(local_part(value)) if isinstance(value, torch.Tensor) else repr(value).encode()
        )
    counters = tuple(counters_of(train_state.counters))
    return CheckpointedState(random.hexdigest(), tensors.hexdigest(), counters)


def _trained(train_state: TrainState) -> Iterator[object]:
    yield from train_state.model.parameters()
    yield from train_state.model.buffers()
    for optimizer in train_state.optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter
                yield from (v for _, v in sorted(optimizer.state.get(parameter, {}).items()))


def _bytes(tensor: Tensor) -> bytes:
    """Returns a copy; NumPy would keep a storage alive that FSDP1 resizes."""
    import torch

    copied = tensor.detach().to("cpu", copy=True).contiguous().reshape(-1)
    data: bytes = copied.view(torch.uint8).numpy().tobytes()
    return data
