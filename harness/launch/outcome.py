from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from harness.cell.cell import Cell
from harness.cell.redaction import redacted
from harness.launch.watch import Hang, missing, read_groups
from harness.worker.rank_answer import RankAnswer, TrainedAnswer
from harness.worker.reporting import GroupState
from harness.worker.spec import log_file, stacks_file
from harness.worker.worker import no_memory

Facts: TypeAlias = dict[str, Any]

LOG_TAIL_BYTES = 4000
_LONGEST_SECRET = 4096


@dataclass(frozen=True)
class Outcome:
    """Status (see the schema), an actionable reason, and each rank's answer."""

    status: str
    reason: str
    started_at: float = 0.0
    wall_seconds: float = 0.0
    launcher: str = "elastic"
    """The cell's launcher, or a library's own command."""
    answers: tuple[RankAnswer, ...] = ()
    log_tail: str = ""
    stacks: str = ""
    nodes: list[Facts] = field(default_factory=list)
    link: Facts = field(default_factory=dict)
    checkpoint: Facts = field(default_factory=dict)
    """Values of the columns about a checkpoint, by name."""

    @property
    def startup_seconds(self) -> float | None:
        """Returns seconds from launch until the last rank has imported torch, unless the clock was
        set in between."""
        entered = [a.entered_at for a in self.answers if a.entered_at is not None]
        seconds = max(entered) - self.started_at if entered else None
        return seconds if seconds is not None and 0 <= seconds <= self.wall_seconds else None

    @property
    def trained(self) -> list[TrainedAnswer]:
        return [answer.trained for answer in self.answers if answer.trained]


@dataclass
class RankOutputs:
    """What ranks left behind, by rank."""

    answers: dict[int, RankAnswer] = field(default_factory=dict)
    logs: dict[int, str] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)
    exit_codes: dict[int, int] = field(default_factory=dict)
    groups: dict[int, list[GroupState]] = field(default_factory=dict)
    """Collectives that each rank had entered when asked; empty if it did not answer."""
    hang: Hang | None = None
    timed_out: bool = False
    interrupted: bool = False
    not_started: str = ""
    oom_kills: int = 0
    """Processes of this control group that the OOM killer ended."""
    ended: str = ""
    """How a library's launcher ended; only the launcher knows which rank ended first."""

    def read(self, scratch: str, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if answer := RankAnswer.read(scratch, rank):
                self.answers[rank] = answer
            self.logs[rank] = _tail(log_file(scratch, rank))
            if text := _tail(stacks_file(scratch, rank), 20000):
                self.stacks[rank] = text
            if self.hang or self.timed_out:
                self.groups[rank] = read_groups(scratch, rank)

    def add(self, other: RankOutputs) -> None:
        self.answers |= other.answers
        self.logs |= other.logs
        self.stacks |= other.stacks
        self.groups |= other.groups
        self.hang = _together(self.hang, other.hang)
        self.exit_codes |= other.exit_codes
        self.timed_out |= other.timed_out
        self.interrupted |= other.interrupted
        self.not_started = self.not_started or other.not_started
        self.oom_kills += other.oom_kills

    @property
    def succeeded(self) -> bool:
        return (
            not self.timed_out
            and not self.hang
            and not self.interrupted
            and not self.not_started
            and all(a.succeeded for a in self.answers.values())
        )


def classify_end(cell: Cell, processes: int, outputs: RankOutputs, lost: str = "") -> Outcome:
    """Returns status and reason, without times and nodes. `lost`: what became of a lost node."""
    answers = tuple(outputs.answers.get(rank, RankAnswer(rank)) for rank in range(processes))
    stacks = "\n".join(f"rank {rank}:\n{text}" for rank, text in sorted(outputs.stacks.items()))

    def ended(status: str, reason: str, rank: int = 0) -> Outcome:
        tail = outputs.logs.get(rank, "")
        return Outcome(status, redacted(reason), answers=answers, log_tail=tail, stacks=stacks)

    if outputs.interrupted:
        return ended("interrupted", "stopped by the user")
    if lost:
        return ended("failed", lost)
    if outputs.not_started:
        return ended("failed", f"the ranks could not be started: {outputs.not_started}")
    if outputs.hang or outputs.timed_out:
        why = missing(outputs.groups, outputs.stacks)
        recorded = "".join([f"; {why}" if why else "", "; its ranks' stacks are recorded"])
        limit = f"still running after its time limit of {cell.time_limit_seconds:g} s"
        return ended("timeout", (outputs.hang.description() if outputs.hang else limit) + recorded)
    silent = [answer.rank for answer in answers if answer.silent]
    failed = sorted(
        ((answer.rank, answer.failure) for answer in answers if answer.failure),
        key=lambda pair: pair[1].failed_at,
    )
    causes = [(rank, failure) for rank, failure in failed if not failure.consequence]
    if not causes and silent:
        # A rank that exits without an answer makes others fail. If several did, the launcher knows
        # the first.
        rank = next((r for r in outputs.exit_codes if r in silent), silent[0])
        reason = outputs.ended or ending(outputs.exit_codes.get(rank), by=f"rank {rank}")
        # std::bad_alloc outside Python ends the process before it answers.
        if line := no_memory(outputs.logs.get(rank, "")):
            reason = f"{reason}; its log says: {line}"
        if outputs.oom_kills:
            counted = "the kernel's count of out-of-memory kills rose by"
            reason = f"{reason}; {counted} {outputs.oom_kills}"
        status = "out_of_memory" if line or outputs.oom_kills else "failed"
        return ended(status, reason, 0 if outputs.ended else rank)
    for rank, failure in causes or failed:
        return ended(failure.status, f"rank {rank}: {failure.reason}", rank)
    return Outcome("ok", "", answers=answers)


def _together(first: Hang | None, other: Hang | None) -> Hang | None:
    if first is None or other is None:
        return first or other
    return Hang(max(first.seconds, other.seconds), first.doing | other.doing)


def ending(exit_code: int | None, by: str) -> str:
    if exit_code is not None and exit_code < 0:
        name = signal.Signals(-exit_code).name
        return f"{by} was killed by {name}, from outside" + (
            " or by the kernel's out-of-memory killer" if name == "SIGKILL" else " or it crashed"
        )
    return f"{by} exited with code {exit_code or 0} before its steps were done"


def _tail(file: Path, size: int = LOG_TAIL_BYTES) -> str:
    try:
        with open(file, "rb") as content:
            # Read some bytes before the tail, so that a secret cut in half is redacted.
            begin = max(0, content.seek(0, os.SEEK_END) - size - _LONGEST_SECRET)
            content.seek(begin)
            text = content.read(size + _LONGEST_SECRET).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    return redacted(text).encode()[-size:].decode("utf-8", "ignore").strip()
