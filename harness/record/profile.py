"""Into what a step's time and its peak of memory are broken down."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


SPLIT = ("parameters", "gradients", "optimizer", "activations", "library", "other")


COMPONENTS = ("compute", "communication", "optimizer", "data", "bubble", "offload", "other")
"""They sum to the step's time; `communication` is the exposed one."""
