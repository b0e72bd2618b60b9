from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from harness.spec.errors import UsageError

HOME = Path(__file__).with_name("plan.yaml")


class Step(BaseModel):
    """A command or a probe, and the claim that it settles."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,40}$")
    claim: str
    limit_seconds: float = Field(gt=0)
    words: str = ""
    """Arguments of `python -m bench`; empty for a probe."""
    probe: str = ""
    """Name of a probe in bench/gpu_check/probes, or MODULE:FUNCTION."""
    status: str = "ok"
    """Required status of its cells."""

    @model_validator(mode="after")
    def _is_one_thing(self) -> Step:
        if bool(self.words) == bool(self.probe):
            raise ValueError(f"step {self.name!r} needs either words or a probe")
        return self

    @property
    def arguments(self) -> tuple[str, ...]:
        return tuple(shlex.split(self.words))


class CheckPlan(BaseModel):
    """All steps, most valuable first."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    probes: tuple[Step, ...] = ()
    """First steps, several at a time."""
    gate: Step | None = None
    """Step that ends the check if nothing trains."""
    lanes: tuple[tuple[Step, ...], ...] = ()
    """Queues of steps; on one GPU they run in parallel, on separate cores."""
    alone: tuple[Step, ...] = ()
    """Timed steps, one at a time; the lanes before them leave enough time."""
    later: tuple[tuple[Step, ...], ...] = ()
    """Lanes that run after the timed steps and the other lanes."""

    @model_validator(mode="after")
    def _has_distinct_names(self) -> CheckPlan:
        names = [step.name for _, step in self.steps()]
        if len(set(names)) < len(names):
            raise ValueError("two steps have the same name")
        return self

    def steps(self) -> Iterator[tuple[str, Step]]:
        yield from (("probes", step) for step in self.probes)
        if self.gate:
            yield "gate", self.gate
        yield from (("lanes", step) for lane in self.lanes for step in lane)
        yield from (("alone", step) for step in self.alone)
        yield from (("later", step) for lane in self.later for step in lane)


def read_plan(file: Path = HOME) -> CheckPlan:
    """Raises UsageError if the file is missing or not a plan."""
    try:
        return CheckPlan.model_validate(yaml.safe_load(file.read_text()))
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise UsageError(f"{str(file)!r} is not a plan of a GPU check: {error}") from None
