from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.analysis.consistency import mean_losses
from harness.cell.errors import BadCheckpoint
from harness.host.folders import scratch_folder
from harness.launch.interleaved import Launch
from harness.launch.launcher import LauncherProtocol, LaunchOptions
from harness.launch.outcome import Outcome
from harness.record.checkpoint import Manifest
from harness.record.run_record import RankStep
from harness.worker.rank_answer import (
    CheckpointedState,
    LoadedAnswer,
    RankAnswer,
    SavedAnswer,
)
from harness.worker.spec import Checkpointing


@dataclass(frozen=True)
class RestartedLaunch:
    """A launch that saves a checkpoint and is killed, and a second one that loads it and
    continues."""

    saves: Launch
    loads: Launch
    after: int = field(kw_only=True)
    bitwise: bool = False
    """Whether loaded tensors must equal the saved tensors bitwise; a wide tolerance would hide
    errors."""

    @property
    def same(self) -> bool:
        return self.saves.cell == self.loads.cell

    def run(self, launcher: LauncherProtocol, on_progress: Callable[[int, float], None]) -> Outcome:
        """Runs both launches; the second one only if the first saved an intact checkpoint."""
        with scratch_folder() as scratch:
            folder = scratch / "checkpoint"
            folder.mkdir()
            first = self._launch(launcher, self.saves, folder, False, on_progress)
            saved = [answer.saved for answer in first.answers if answer.saved]
            if first.status != "ok":
                return replace(first, reason=f"before the restart: {first.reason}")
            try:
                manifest = Manifest.verified(folder)
                if manifest.step != self.after:
                    raise BadCheckpoint(
                        f"it was saved after step {manifest.step}, not {self.after}"
                    )
            except BadCheckpoint as error:
                return replace(first, status="failed", reason=f"checkpoint not loaded: {error}")
            second = self._launch(launcher, self.loads, folder, True, on_progress)
        # The record's start is the first launch's, which must not lengthen the second's start-up.
        earlier = first.started_at - second.started_at
        answers = [
            replace(answer, entered_at=answer.entered_at and answer.entered_at + earlier)
            for answer in joined(saved, second.answers)
        ]
        second = replace(
            second,
            answers=tuple(answers),
            checkpoint=checkpoint_facts(manifest, saved, loaded_by(second), self.same),
            started_at=first.started_at,
            wall_seconds=first.wall_seconds + second.wall_seconds,
        )
        lost = not_restored(saved, loaded_by(second), self.bitwise) if self.same else ""
        if second.status == "ok" and lost:
            return replace(second, status="failed", reason=lost)
        return replace(
            second, reason=f"after the restart: {second.reason}" if second.reason else ""
        )

    def _launch(
        self,
        launcher: LauncherProtocol,
        how: Launch,
        folder: Path,
        loads: bool,
        on_progress: Callable[[int, float], None],
    ) -> Outcome:
        checkpoint = Checkpointing(str(folder), self.after, loads)
        more: LaunchOptions = {**how.more, "max_restarts": 0, "checkpoint": checkpoint}
        return replace(how, more=more).run(launcher, on_progress)


def loaded_by(outcome: Outcome) -> list[LoadedAnswer]:
    return [rank.loaded for rank in outcome.trained if rank.loaded]


def checkpoint_facts(
    manifest: Manifest, saved: Sequence[SavedAnswer], loaded: Sequence[LoadedAnswer], same: bool
) -> dict[str, object]:
    """Returns a trial's checkpoint columns; those about loading are null if it failed. `same`:
    whether the same strategy and number of ranks saved it."""
    before, after = [rank.state for rank in saved], [rank.state for rank in loaded]

    def restores(part: Callable[[CheckpointedState], object]) -> bool | None:
        return list(map(part, before)) == list(map(part, after)) if loaded and same else None

    return {
        "checkpoint_step": manifest.step,
        "checkpoint_ranks": manifest.ranks,
        "checkpoint_bytes": manifest.total_bytes,
        "checkpoint_files": len(manifest.files),
        "checkpoint_save_seconds": max(rank.save_seconds for rank in saved),
        "checkpoint_blocked_seconds": max(rank.blocked_seconds for rank in saved),
        "checkpoint_load_seconds": max(
            (rank.load_seconds for rank in loaded if rank.load_seconds is not None), default=None
        ),
        "checkpoint_restores_random": restores(lambda state: state.random),
        "checkpoint_restores_bits": restores(lambda state: state.tensors),
    }


def not_restored(
    saved: Sequence[SavedAnswer], loaded: Sequence[LoadedAnswer], tensors: bool
) -> str:
    """Returns which step counters a library did not restore, and with `tensors` which tensors."""
    for rank, (saved_value, other) in enumerate(zip(saved, loaded, strict=False)):
        before, after = saved_value.state, other.state
        if before.counters != after.counters:
            return (
                f"rank {rank}'s step counters were {list(before.counters)} when it saved and are"
                f" {list(after.counters)} after loading"
            )
        if tensors and before.tensors != after.tensors:
            return (
                f"rank {rank}'s parameters or optimizer states differ from those that it saved,"
                " which its tolerance would hide"
            )
    return ""


def joined(saved: Sequence[SavedAnswer], answers: Sequence[RankAnswer]) -> tuple[RankAnswer, ...]:
    """Returns the new ranks' answers, preceded by the steps before the checkpoint. Those get the
    mean loss over the old ranks, whose number may differ."""
    ranks = [rank.steps for rank in saved]
    losses = mean_losses([[step.loss for step in steps] for steps in ranks])

    def before(rank: int) -> tuple[RankStep, ...]:
        steps = ranks[rank % len(ranks)]
        return tuple(replace(s, loss=loss) for s, loss in zip(steps, losses, strict=True))

    return tuple(
        replace(answer, trained=replace(trained, steps=before(answer.rank) + trained.steps))
        if (trained := answer.trained)
        else answer
        for answer in answers
    )
