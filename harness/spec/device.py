"""Types of devices that cells run on, and why others are refused."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

OTHER_DEVICES = {
    "mps": "Apple's GPUs are not supported, because the suite measures time, memory and processes"
    " through Linux; use cpu",
    "xpu": "Intel's GPUs are not supported, because the suite cannot measure their memory or"
    " compare their random numbers; use cpu",
}
"""Why cells do not run on torch's other device types."""


def _refuse(value: object) -> object:
    if isinstance(value, str) and value in OTHER_DEVICES:
        raise PydanticCustomError("unsupported_device", OTHER_DEVICES[value])
    return value


DeviceType: TypeAlias = Annotated[Literal["cpu", "cuda"], BeforeValidator(_refuse)]
