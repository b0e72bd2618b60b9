"""The table `trials`: one row per trial."""

from __future__ import annotations

from dataclasses import dataclass

from harness.record.trial_figures import TrialEfficiency, TrialParity, TrialSpeed, TrialSurroundings
from harness.record.trial_memory import TrialMemory, TrialStates, TrialTraffic
from harness.record.trial_setting import (
    TrialEnd,
    TrialIdentity,
    TrialPlacement,
    TrialSetting,
    TrialWorkload,
)


@dataclass(frozen=True, kw_only=True)
class TrialRecord(
    TrialParity,
    TrialMemory,
    TrialEfficiency,
    TrialSurroundings,
    TrialSpeed,
    TrialTraffic,
    TrialStates,
    TrialSetting,
    TrialPlacement,
    TrialWorkload,
    TrialEnd,
    TrialIdentity,
):
    """A trial of a cell, launched or not.

    Fields of the last base come first in a dataclass: read the bases from the end.
    """
