"""What became of a trial, from what its ranks left in its folder."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.cell import Cell
from harness.trial import answer_file, log_file, stacks_file
from harness.worker import no_memory

LOG_TAIL_BYTES = 4000


@dataclass(frozen=True)
class Outcome:
    """What became of a trial: `status` as in the schema, the reason a person can act on, and each rank's answer."""

    status: str
    reason: str
    started_at: float
    wall_seconds: float
    launcher: str = "elastic"
    """Who started the ranks: the cell's launcher, or the command of a library's own."""
    answers: list[dict[str, Any]] = field(default_factory=list)
    log_tail: str = ""
    stacks: str = ""

    @property
    def startup_seconds(self) -> float | None:
        """From the launch to the last rank's first instruction."""
        entered = [a["entered_at"] for a in self.answers if "entered_at" in a]
        return max(entered) - self.started_at if entered else None


def read_outcome(
    cell: Cell, scratch: str, processes: int, timed_out: bool, interrupted: bool, exit_codes: dict[int, int], ended: str = ""
) -> dict[str, Any]:
    """Status, reason, answers, log and stacks from what the ranks left in the trial's folder.

    `ended`: how another launcher went, which alone knows which rank went first and says so in rank 0's log.
    """
    answers = []
    for rank in range(processes):
        file = answer_file(scratch, rank)
        answers.append(json.loads(file.read_text()) if file.exists() else {"rank": rank})
    logs = {rank: _tail(log_file(scratch, rank)) for rank in range(processes)}
    stacks = "\n".join(f"rank {r}:\n{text}" for r in range(processes) if (text := _tail(stacks_file(scratch, r), 20000)))
    if interrupted:
        return {"status": "interrupted", "reason": "stopped by the user", "answers": answers, "log_tail": logs[0], "stacks": stacks}
    if timed_out:
        reason = f"still running after its time limit of {cell.time_limit_seconds:g} s; the stacks of its ranks are recorded"
        return {"status": "timeout", "reason": reason, "answers": answers, "log_tail": logs[0], "stacks": stacks}
    silent = [a["rank"] for a in answers if "status" not in a]
    failed = [a for a in answers if a.get("status") not in (None, "ok")]
    causes = [a for a in failed if not a["consequence"]]
    if causes:
        first = min(causes, key=lambda a: a["failed_at"])
        reason, status = f"rank {first['rank']}: {first['reason']}", first["status"]
    elif silent:
        # What the others say is a consequence of one that said nothing; of several such, the agent knows which went first.
        rank = next((r for r in exit_codes if r in silent), silent[0])
        first, status, reason = {"rank": 0 if ended else rank}, "failed", ended or ending(exit_codes.get(rank), by=f"rank {rank}")
        if said := no_memory(logs[rank]):  # std::bad_alloc outside Python ends the process before it can answer
            status, reason = "out_of_memory", f"{reason}; its log says: {said}"
    elif failed:
        first = min(failed, key=lambda a: a["failed_at"])
        reason, status = f"rank {first['rank']}: {first['reason']}", first["status"]
    else:
        return {"status": "ok", "reason": "", "answers": answers}
    return {"status": status, "reason": reason, "answers": answers, "log_tail": logs[first["rank"]], "stacks": stacks}


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
