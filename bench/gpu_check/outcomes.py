from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from bench.gpu_check.steps import Step
from harness.record.trial_status import NOT_LAUNCHED
from harness.spec.errors import UsageError
from harness.spec.text import plural

NO_TIME = "no time was left; continue with --resume"
GOOD_PARITY = ("exact", "within tolerance")

Verdict = Literal["confirmed", "refuted", "not checked"]


@dataclass(frozen=True)
class StepOutcome:
    name: str
    section: str
    claim: str
    verdict: Verdict
    reason: str
    seconds: float = 0.0
    exit_code: int | None = None
    """None: not begun or stopped; the next call runs it."""
    log: tuple[str, ...] = ()
    """End of its error output."""
    shown: dict[str, object] = field(default_factory=dict)
    """JSON object that it printed."""

    @property
    def settled(self) -> bool:
        return self.exit_code is not None

    @property
    def trained(self) -> bool:
        return self.verdict == "confirmed" or any(
            cell.status == "ok" for cell in cells_of(self.shown) if "cells" in self.shown
        )


@dataclass(frozen=True)
class Report:
    check_id: str
    device: str
    """`cuda`, or `cpu` for a rehearsal."""
    stand_in: str | None
    outcomes: tuple[StepOutcome, ...] = ()

    @classmethod
    def new(cls, device: str) -> Report:
        stand_in = None if device == "cuda" else "the CPU stands in for a GPU"
        return cls(secrets.token_hex(4), device, stand_in)

    @classmethod
    def read(cls, file: Path) -> Report:
        """Raises UsageError if the file is not a report."""
        try:
            values = json.loads(file.read_text())
            outcomes = tuple(
                StepOutcome(**{**outcome, "log": tuple(outcome["log"])})
                for outcome in values.pop("outcomes")
            )
            return cls(**values, outcomes=outcomes)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            raise UsageError(f"{str(file)!r} is not a report of a GPU check") from None

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, default=str)

    def outcome(self, name: str) -> StepOutcome | None:
        return next((outcome for outcome in self.outcomes if outcome.name == name), None)


@dataclass(frozen=True)
class ShownCell:
    name: str
    status: str
    parity: str | None
    reason: str

    @classmethod
    def read(cls, cell: Mapping[str, object]) -> ShownCell:
        parity = cell.get("parity_verdict")
        return cls(
            str(cell.get("cell_name") or cell.get("label") or cell.get("cell_id")),
            str(cell.get("status")),
            None if parity is None else str(parity),
            str(cell.get("reason")),
        )


def cells_of(shown: Mapping[str, object]) -> list[ShownCell]:
    listed = shown.get("cells") or shown.get("strategies") or [shown]
    assert isinstance(listed, list)
    return [ShownCell.read(cell) for cell in listed]


def step_verdict(step: Step, shown: Mapping[str, object]) -> tuple[Verdict, str]:
    if step.probe:
        verdicts: dict[str, Verdict] = {"confirmed": "confirmed", "refuted": "refuted"}
        return verdicts.get(str(shown.get("verdict")), "not checked"), str(shown.get("reason"))
    cells = cells_of(shown)
    ran = [cell for cell in cells if cell.status not in NOT_LAUNCHED]
    if not ran:
        return "not checked", "; ".join(sorted({cell.reason for cell in cells})) or "no cell ran"
    wrong = [
        f"{cell.name}: {cell.status}, parity {cell.parity}, {cell.reason}"
        for cell in ran
        if not _is_as_claimed(step, cell)
    ]
    if wrong:
        return "refuted", "; ".join(wrong)
    return "confirmed", f"{len(ran)} of {plural(len(cells), 'cell')}: {step.status}"


def _is_as_claimed(step: Step, cell: ShownCell) -> bool:
    if step.arguments[0] == "maxsize":
        return cell.status in ("found", "all fit")
    return cell.status == step.status and (
        step.status != "ok" or cell.parity is None or cell.parity in GOOD_PARITY
    )


def last_object(text: str) -> dict[str, object]:
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                value = json.loads(line)
                if isinstance(value, dict):
                    return value
    return {}
