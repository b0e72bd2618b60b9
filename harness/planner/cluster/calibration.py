"""A calibration: fitted constants, how far to trust them, and what they were fitted to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import yaml
from pydantic import TypeAdapter, ValidationError
from scipy.special import ndtr, ndtri

from harness.planner.cluster.constants import MemoryConstants, TimeConstants, bounds_of
from harness.planner.cluster.layouts import Floats, Ints
from harness.spec.errors import UsageError, first_error
from harness.spec.yaml_text import parse_yaml

DEFAULT = Path(__file__).parents[1].joinpath("calibration.yaml")


@dataclass(frozen=True)
class Limit:
    """A limit of memory that is not sharp."""

    share: float
    """Of the device's memory, at which half of all runs pass it."""
    spread: float
    """Standard deviation of the logarithm of that share."""

    def passed(self, demand: Floats, memory_bytes: float) -> Floats:
        """Probability that the demand, in bytes, stays below the limit."""
        result: Floats = ndtr(np.log(self.share * memory_bytes / demand) / self.spread)
        return result


@dataclass(frozen=True)
class Spread:
    """Of measurements around predictions."""

    time: float
    """Half-width of the 80 % interval of the logarithm of the step time, on one node."""
    time_per_doubling: float
    """By how much it grows with each doubling of the nodes."""
    memory: float
    """Half-width of the 80 % interval of the logarithm of peak memory."""
    room: Limit
    """For what the allocator would reserve: beyond it, it frees and asks again in every
    micro-batch, which takes many times as long."""
    end: Limit
    """For what is left when it has freed all it can: beyond it, the run fails."""
    slow: float
    """Logarithm of how many times as long as predicted a run beyond `room` takes."""
    slow_spread: float
    """Standard deviation of that logarithm."""
    outside: float = 0.025
    """By how much each half-width grows with each doubling beyond the calibrated range. Assumed:
    no calibration measures beyond its own range."""

    def upper(self, half_width: Floats, slow: Floats) -> Floats:
        """By how much the logarithm of the step time may lie above the predicted one: it does so in
        one of ten runs, where the share `slow` of the runs (shape of both arrays) is beyond `room`.

        The 0.9-quantile of a mixture of two normal distributions: that of runs at full speed, with
        `half_width`, and that of slow runs. While less than a tenth is slow, the former's quantile
        is moved out; else it lies among the slow ones. Never less than `half_width`.
        """
        tenth = np.minimum(slow, 0.0999)
        within = half_width / ndtri(0.9) * ndtri(0.9 / (1 - tenth))
        share = np.clip(0.1 / np.maximum(slow, 0.1), 0.001, 0.999)
        beyond = self.slow + self.slow_spread * ndtri(1 - share)
        moved = np.maximum(half_width, np.minimum(within, self.slow))
        result: Floats = np.where(slow < 0.1, moved, np.maximum(moved, beyond))
        return result


@dataclass(frozen=True)
class Range:
    """What the calibration has seen."""

    parameters: tuple[float, float]
    nodes: tuple[int, int]
    tensor: int
    pipeline: int

    def beyond(self, parameters: float, nodes: Ints, tensor: Ints, pipeline: Ints) -> Floats:
        """Doublings outside of the range, over all its sides (shape of the arrays); 0 inside."""
        low, high = self.parameters
        model = max(0.0, np.log2(low / parameters), np.log2(parameters / high))
        few, many = self.nodes
        total: Floats = model + np.maximum(0.0, np.log2(few / np.maximum(nodes, 1)))
        for value, most in (
            (nodes, many),
            (tensor, self.tensor),
            (pipeline, self.pipeline),
        ):
            total = total + np.maximum(0.0, np.log2(np.maximum(value, 1) / most))
        return total


@dataclass(frozen=True)
class Calibration:
    """All that a prediction needs beyond the question."""

    source: str
    """What it was fitted to, and how."""
    time: TimeConstants
    memory: MemoryConstants
    spread: Spread
    range: Range
    links: str
    """Of the cluster that was measured."""

    def time_on(self, links: str) -> TimeConstants:
        """The constants of the step time on a cluster with these links: `pipeline_stall` is a habit
        of the software that was measured, which nothing says of runs elsewhere."""
        return self.time if links == self.links else replace(self.time, pipeline_stall=0.0)

    def save(self, file: Path) -> None:
        text = yaml.safe_dump(
            TypeAdapter(Calibration).dump_python(self, mode="json"), sort_keys=False
        )
        file.write_text(text, encoding="utf-8")


def load(file: Path = DEFAULT) -> Calibration:
    """The calibration of a file.

    Raises UsageError where the file cannot be read, or a constant is outside of its bounds.
    """
    try:
        values = parse_yaml(file.read_bytes(), f"calibration {str(file)!r}")
        calibration = TypeAdapter(Calibration).validate_python(values)
    except OSError as error:
        raise UsageError(f"cannot read calibration {str(file)!r}: {error.strerror}") from None
    except ValidationError as error:
        raise UsageError(f"calibration {str(file)!r}: {first_error(error)}") from None
    for constants in (calibration.time, calibration.memory):
        require_within_bounds(constants, str(file))
    return calibration


def require_within_bounds(constants: TimeConstants | MemoryConstants, where: str) -> None:
    """Raises UsageError for the first constant that physics excludes."""
    for name, bounds in bounds_of(type(constants)).items():
        value = getattr(constants, name)
        slack = 1e-9 * (bounds.high - bounds.low)
        if not bounds.low - slack <= value <= bounds.high + slack:
            raise UsageError(
                f"{where}: {name} is {value:g} {bounds.unit}, outside of its bounds"
                f" {bounds.low:g} to {bounds.high:g}"
            )
