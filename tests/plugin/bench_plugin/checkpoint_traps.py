"""A strategy that loses state when it loads a checkpoint; parity or the harness must notice."""

from pathlib import Path
from typing import Literal

from harness.seam import Batch, Job, Strategy, TrainStep, standard_step
from harness.seam.checkpoints import load_by_torch, save_by_torch


class Counted:
    """A library's own step count."""

    steps = 0


class CheckpointTraps(Strategy):
    """FSDP2 with one mistake in loading."""

    mistake: Literal[
        "none",
        "nothing_loaded",
        "no_optimizer_state",
        "no_step_counts",
        "one_shard_not_loaded",
        "data_position_ignored",
        "library_counter_lost",
    ] = "none"
    """The planted mistake."""

    def setup(self, job: Job) -> TrainStep:
        from torch.distributed.fsdp import fully_shard

        model = job.model()
        fully_shard(model)
        optimizer = job.optimizer(model.parameters())
        counted = Counted()
        state = job.register(model, optimizer)
        state.counters = ((counted, "steps"),)
        train = standard_step(job, model, optimizer)

        def step(batch: Batch) -> object:
            counted.steps += 1
            return train(batch)

        def load(folder: Path) -> int:
            before = [p.to_local().clone() for p in model.parameters()]
            position = load_by_torch(job, state, folder)
            mine = self.mistake == "one_shard_not_loaded" and job.rank == 1
            if mine or self.mistake == "nothing_loaded":
                for parameter, old in zip(model.parameters(), before, strict=True):
                    parameter.to_local().detach().copy_(old)
            if self.mistake in ("nothing_loaded", "no_optimizer_state"):
                optimizer.state.clear()
            if self.mistake == "no_step_counts":
                for of_parameter in optimizer.state.values():
                    of_parameter["step"].zero_()
            if self.mistake == "library_counter_lost":
                counted.steps = 0
            return 0 if self.mistake == "data_position_ignored" else position

        job.save_by(lambda folder, steps: save_by_torch(job, state, folder, steps), load)
        return step
