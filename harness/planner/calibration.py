"""A calibration: fitted constants, how far to trust them, and what they were fitted to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml
from pydantic import TypeAdapter, ValidationError
from scipy.special import ndtr

from harness.planner.constants import MemoryConstants, TimeConstants, bounds_of
from harness.planner.layouts import Floats, Ints
from harness.spec.errors import UsageError, first_error
from harness.spec.yaml_text import parse_yaml

DEFAULT = Path(__file__).with_name("calibration.yaml")


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
    squeeze: float
    """Share of the activations' bytes that is left then."""
    outside: float = 0.025
    """By how much each half-width grows with each doubling beyond the calibrated range. Assumed:
    no calibration measures beyond its own range."""


@dataclass(frozen=True)
class Range:
    """What the calibration has seen."""

    parameters: tuple[float, float]
    nodes: int
    tensor: int
    pipeline: int

    def beyond(self, parameters: float, nodes: Ints, tensor: Ints, pipeline: Ints) -> Floats:
        """Doublings outside of the range, over all its sides (shape of the arrays); 0 inside."""
        low, high = self.parameters
        model = max(0.0, np.log2(low / parameters), np.log2(parameters / high))
        total = np.full(np.shape(nodes), model)
        for value, most in (
            (nodes, self.nodes),
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
