"""What became of a trial, from what its ranks left in its folder."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.spec.cell import Cell
from harness.worker.spec import answer_file, log_file, stacks_file
from harness.worker.worker import no_memory

LOG_TAIL_BYTES = 4000


@dataclass(frozen=True)
class Outcome:
    """What became of a trial: `status` as in the schema, the reason a person can act on, and each
    rank's answer."""

    status: str
    reason: str
    started_at: float
    wall_seconds: float
    launcher: str = "elastic"
    """Who started the ranks: the cell's launcher, or the command of a library's own."""
    answers: list[dict[str, Any]] = field(default_factory=list)
    log_tail: str = ""
    stacks: str = ""
    nodes: list[dict[str, Any]] = field(default_factory=list)
    """Facts of the nodes it ran on (see harness/nodes/facts.py) where they are other than this
    process's own."""
    link: dict[str, Any] = field(default_factory=dict)
    """The record's columns about the emulated link between them (see harness/links); empty where
    there is none."""

    @property
    def startup_seconds(self) -> float | None:
        """From the launch to the last rank's first instruction."""
        entered = [a["entered_at"] for a in self.answers if "entered_at" in a]
        return max(entered) - self.started_at if entered else None


@dataclass
class RankOutputs:
    """What the ranks of one node, or of all together, left behind, by rank."""

    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    logs: dict[int, str] = field(default_factory=dict)
    """End of each rank's log."""
    stacks: dict[int, str] = field(default_factory=dict)
    exit_codes: dict[int, int] = field(default_factory=dict)
    """Of the ranks that went first, as far as their launcher knows."""
    timed_out: bool = False
    interrupted: bool = False
    ended: str = ""
    """How another launcher went, which alone knows which rank went first and says so in rank 0's
    log."""

    def read(self, scratch: str, ranks: Iterable[int]) -> None:
        """Adds what these ranks left in their folder."""
        for rank in ranks:
            file = answer_file(scratch, rank)
            if file.exists():
                self.answers[rank] = json.loads(file.read_text())
            self.logs[rank] = _tail(log_file(scratch, rank))
            if text := _tail(stacks_file(scratch, rank), 20000):
                self.stacks[rank] = text

    def add(self, other: RankOutputs) -> None:
        """Another node's ranks."""
        self.answers |= other.answers
        self.logs |= other.logs
        self.stacks |= other.stacks
        self.exit_codes |= other.exit_codes
        self.timed_out |= other.timed_out
        self.interrupted |= other.interrupted

    @property
    def well(self) -> bool:
        """Whether every rank here did what it was to do."""
        return (
            not self.timed_out
            and not self.interrupted
            and all(a.get("status") == "ok" for a in self.answers.values())
        )


def judge(cell: Cell, processes: int, left: RankOutputs, lost: str = "") -> dict[str, Any]:
    """Status, reason, answers, log and stacks from what the ranks left.

    `lost`: what became of a node that cannot say it itself.
    """
    answers = [left.answers.get(rank, {"rank": rank}) for rank in range(processes)]
    logs = {rank: left.logs.get(rank, "") for rank in range(processes)}
    stacks = "\n".join(f"rank {rank}:\n{text}" for rank, text in sorted(left.stacks.items()))
    said = {"answers": answers, "log_tail": logs[0], "stacks": stacks}
    if left.interrupted:
        return {"status": "interrupted", "reason": "stopped by the user", **said}
    if lost:
        return {"status": "failed", "reason": lost, **said}
    if left.timed_out:
        reason = (
            f"still running after its time limit of {cell.time_limit_seconds:g} s; the stacks of"
            " its ranks are recorded"
        )
        return {"status": "timeout", "reason": reason, **said}
    silent = [a["rank"] for a in answers if "status" not in a]
    failed = [a for a in answers if a.get("status") not in (None, "ok")]
    causes = [a for a in failed if not a["consequence"]]
    if causes:
        first = min(causes, key=lambda a: a["failed_at"])
        reason, status = f"rank {first['rank']}: {first['reason']}", first["status"]
    elif silent:
        # What the others say is a consequence of one that said nothing; of several such, the agent
        # knows which went first.
        rank = next((r for r in left.exit_codes if r in silent), silent[0])
        first, status = {"rank": 0 if left.ended else rank}, "failed"
        reason = left.ended or ending(left.exit_codes.get(rank), by=f"rank {rank}")
        if found := no_memory(
            logs[rank]
        ):  # std::bad_alloc outside Python ends the process before it can answer
            status, reason = "out_of_memory", f"{reason}; its log says: {found}"
    elif failed:
        first = min(failed, key=lambda a: a["failed_at"])
        reason, status = f"rank {first['rank']}: {first['reason']}", first["status"]
    else:
        return {"status": "ok", "reason": "", "answers": answers}
    return {
        "status": status,
        "reason": reason,
        "answers": answers,
        "log_tail": logs[first["rank"]],
        "stacks": stacks,
    }


def ending(exit_code: int | None, by: str) -> str:
    """How a process that left no answer went, in words."""
    if exit_code is not None and exit_code < 0:
        name = signal.Signals(-exit_code).name
        return f"{by} was killed by {name}, from outside" + (
            " or by the kernel for lack of memory" if name == "SIGKILL" else " or by its own fault"
        )
    return f"{by} left with exit code {exit_code or 0} before its steps were done"


def _tail(file: Path, size: int = LOG_TAIL_BYTES) -> str:
    if not file.exists():
        return ""
    return file.read_bytes()[-size:].decode("utf-8", "replace").strip()
